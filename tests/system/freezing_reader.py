"""A worker process that freezes the process it reads from, once, as soon as a read was posted.

    python -m tests.system.freezing_reader FILE prefill|decode OPTIONS

FILE holds the number of the process to stop; it is taken away when that was done.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import tandem
from commands.table import parse
from kvtransfer.nixl_transport import NixlTransport


def install(target: Path) -> None:
    read = NixlTransport.read

    def read_and_freeze(self: NixlTransport, incarnation: str, pages: Any) -> Any:
        posted = read(self, incarnation, pages)
        if target.exists():
            os.kill(int(target.read_text()), signal.SIGSTOP)
            target.unlink()
        return posted

    NixlTransport.read = read_and_freeze  # type: ignore[method-assign]


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    sys.exit(tandem.run(parse(sys.argv[2:])))
