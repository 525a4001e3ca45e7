"""What Triton's interpreter does otherwise than a GPU."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture(scope="module")
def ordered_dots() -> Iterator[None]:
    """The interpreter multiplies with BLAS, which rounds a row by its place in the tile. Here an
    element is summed in ascending order, wherever it stands, as by a GPU's units.
    """

    def dot(_: Any, a: Any, b: Any, acc: Any, *_options: Any) -> Any:
        columns, rows = (side.astype(acc.data.dtype) for side in (a.data.T, b.data))
        products = columns[:, :, None] * rows[:, None, :]
        return TensorHandle(np.add.reduce(products, axis=0) + acc.data, acc.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield
