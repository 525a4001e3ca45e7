"""Every cell of the fault matrix, on the virtual clock."""

import pytest

from tests.faults.cells import Fault, Phase, run


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("phase", list(Phase))
def test_cell(phase: Phase, fault: Fault) -> None:
    run(phase, fault)
