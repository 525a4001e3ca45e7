"""Triton interprets its kernels in this process; it must know before the first is defined."""

import os

os.environ["TRITON_INTERPRET"] = "1"
