"""What Triton's interpreter does otherwise than a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture(scope="module")
def ordered_dots() -> Iterator[None]:
    """The interpreter multiplies with BLAS, which rounds a row by its place in the tile. Here an
    element is summed in ascending order, wherever it stands, as by a GPU's units.
    """

    def dot(_: Any, a: Any, b: Any, acc: Any, *_options: Any) -> Any:
        out = acc.data.copy()
        for column, row in zip(a.data.T, b.data, strict=True):
            out += column[:, None].astype(out.dtype) * row[None, :].astype(out.dtype)
        return TensorHandle(out, acc.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield
