"""Creates .venv and installs the locked dependencies and this project into it.

    python3 setup/install.py [--test] [--device auto|cpu|cuda] [--torch-index URL]

Called by `make setup`, with --test by `make test`. Runs under the system's Python, so it uses the
standard library only. What was done is stamped afterwards, with a hash over everything it depends
on; the next run compares the stamp and does nothing. Interrupted, it starts again where it was. The
order is: hashed packages, then torch, then nixl, then the project itself, editable.
"""

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCKS = ROOT / "locks"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_INDEX_TIMEOUT_S = 10
MINIMUM = (3, 11)


class SetupFailed(Exception):
    pass


def main() -> int:
    parser = argparse.ArgumentParser(
        description="create .venv and install Tandem's locked dependencies"
    )
    parser.add_argument(
        "--test", action="store_true", help="what tests, benchmarks and checks need as well"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="which build of torch; auto looks for a GPU",
    )
    parser.add_argument(
        "--torch-index", metavar="URL", default=None, help="take torch from this package index"
    )
    parser.add_argument(
        "--no-kernels", action="store_true", help="do not compile the CPU kernels now"
    )
    options = parser.parse_args()
    try:
        with Path(__file__).open() as lock:
            take_turn(lock.fileno())
            install_packages(options.test, options.device, options.torch_index)
            if not options.no_kernels:
                install_kernels()
    except SetupFailed as failure:
        print(f"setup: {failure}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def take_turn(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another setup is running here; waiting for it")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def install_kernels() -> None:
    kernels, stamp = kernel_fingerprint(), VENV / "stamp-kernels"
    if not is_stamped(stamp, kernels):
        step("compiling the CPU kernels, once", compile_kernels)
        stamp.write_text(kernels)


def install_packages(test: bool, device: str, torch_index: str | None) -> None:
    wanted, stamp = fingerprint(), VENV / ("stamp-test" if test else "stamp-worker")
    if is_stamped(stamp, wanted):
        return
    create_venv()
    with_test, base = VENV / "stamp-test", VENV / "stamp-worker"
    if not is_stamped(base, wanted):
        with_test.unlink(missing_ok=True)
        step(
            "installing locked packages",
            lambda: pip("--require-hashes", "-r", LOCKS / "worker.txt"),
        )
        step("installing torch", lambda: install_torch(device, torch_index))
        step("installing nixl", install_nixl)
        step("installing tandem", install_project)
        base.write_text(wanted)
    if test:
        step("installing test packages", lambda: pip("--require-hashes", "-r", LOCKS / "test.txt"))
        step("installing triton", lambda: pip("--no-deps", pin("torch.txt", "triton")))
        with_test.write_text(wanted)


def fingerprint() -> str:
    """A hash of what decides what is installed, and where: an editable install names its folder."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in [*sorted(LOCKS.glob("*.txt")), ROOT / "pyproject.toml", Path(__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kernel_fingerprint() -> str:
    digest = hashlib.sha256(fingerprint().encode())
    for path in sorted((ROOT / "common" / "kernels" / "cpu").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_kernels() -> None:
    """The compiled code goes to numba's cache, where every worker finds it."""
    modules = (f"engine.kernels.cpu.{name}" for name in ("forward", "landing", "convert"))
    command = [str(PYTHON), "-c", f"import {', '.join(modules)}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()[-3:]
        raise SetupFailed("\n  ".join(["the CPU kernels do not compile:", *lines]))


def is_stamped(stamp: Path, wanted: str) -> bool:
    return PYTHON.exists() and stamp.exists() and stamp.read_text() == wanted


def create_venv() -> None:
    created = VENV / "stamp-created"
    if created.exists() and PYTHON.exists():
        return
    try:
        import ensurepip  # noqa: F401  # Debian ships it in another package
        import venv
    except ImportError:
        raise SetupFailed(
            "the Python module venv is missing; on Debian: apt-get install python3-venv"
        ) from None
    step("creating .venv", lambda: venv.create(VENV, clear=True, with_pip=True))
    created.write_text(sys.version)


def install_torch(device: str, index: str | None) -> None:
    """A CUDA build brings its own triton along; a CPU build has none, and only tests need one."""
    if index is not None:
        pip("--index-url", index, pin("torch.txt", "torch"))
    elif device == "cuda" or (device == "auto" and has_gpu()):
        pip(pin("torch.txt", "torch"))
        warn_of_old_driver()
    else:
        install_cpu_torch()


def install_cpu_torch() -> None:
    """The CPU build where PyTorch's own index answers; else whatever build the plain pin brings."""
    once = ("--timeout", CPU_INDEX_TIMEOUT_S, "--retries", 0)
    try:
        pip("--index-url", CPU_INDEX, *once, "--no-deps", pin("torch.txt", "torch"))
    except SetupFailed:
        say("PyTorch's CPU builds cannot be reached; taking torch from the default index")
        pip(pin("torch.txt", "torch"))


def pin(lock: str, name: str) -> str:
    lines = (LOCKS / lock).read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def has_gpu() -> bool:
    if not list(Path("/dev").glob("nvidia[0-9]*")) and shutil.which("nvidia-smi") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and "GPU" in listing.stdout


def warn_of_old_driver() -> None:
    if ask("import torch; print(torch.cuda.is_available())") != "True":
        cuda = ask("import torch; print(torch.version.cuda)")
        say(
            f"warning: this torch is built for CUDA {cuda} and does not see the GPU; update the"
            " driver, or give the index of another build: make setup SETUP_ARGS='--torch-index URL'"
        )


def install_nixl() -> None:
    """NIXL for the CUDA that torch was built for; without CUDA either would do."""
    cuda = ask("import torch; print(torch.version.cuda)")
    major = "13" if cuda.startswith("13") else "12"
    pip("--no-deps", "-r", LOCKS / f"nixl-cu{major}.txt")


def install_project() -> None:
    # "compat" puts this folder on the path, so that packages added later are found too
    compat = ("--config-settings", "editable_mode=compat")
    pip("--no-deps", "--no-build-isolation", *compat, "--editable", ROOT)


def pip(*arguments: object) -> None:
    quiet = ["--quiet", "--quiet", "--disable-pip-version-check", "--no-input"]
    command = [str(PYTHON), "-m", "pip", "install", *quiet, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()[-8:] or [f"pip exited with {done.returncode}"]
        raise SetupFailed("\n  ".join(["pip failed:", *lines]))


def ask(code: str) -> str:
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupFailed(f"torch does not work in .venv: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip()


def step(text: str, action: Callable[[], None]) -> None:
    started = time.monotonic()
    say(f"{text} ...")
    action()
    say(f"{text}: {time.monotonic() - started:.0f} s")


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.version_info < MINIMUM:
        found = ".".join(map(str, sys.version_info[:2]))
        sys.exit(
            f"setup: Tandem needs Python 3.11 or newer, this is {found};"
            " try: make PYTHON=python3.11 setup"
        )
    sys.exit(main())
