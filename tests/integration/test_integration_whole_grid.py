"""``make grid`` reports what it trained, and what was refused; here with one case of its product."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.integration.grid import FEW, Case, Shape
from tests.integration.grid_checks import Trained, loss_faults
from tests.integration.whole_grid import run
from tests.support.training import Seen

TRAINED, REFUSED = Shape("1f1b", 2, 1, 2), Shape("1f1b", 2, 2, 2)


class Disowned(Shape):
    """A shape that is believed to be refused, and runs."""

    @property
    def accepted(self) -> bool:
        return False


@pytest.mark.nightly
@pytest.mark.multiproc
def test_the_table_counts_what_ran_and_what_was_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([Case(TRAINED, steps=FEW)], [TRAINED, REFUSED]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if line.startswith("| 1f1b"))
    assert row.startswith("| 1f1b | 2 | 2 | 1 | 1 | 1 | 1 | ")
    assert "- combinations trained: 2, of which 1 sequential references" in lines
    assert "- shapes refused, with what to type instead: 1" in lines
    assert "- faults: 0" in lines


def test_a_fault_is_named_and_makes_the_command_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([], [Disowned("1f1b", 2, 1, 2)]) == 1
    seen = capsys.readouterr()
    assert "- faults: 1" in seen.out.splitlines()
    assert seen.err.splitlines() == ["1f1b P2 V1 M2 is not refused"]


def test_a_validation_loss_that_is_not_a_number_is_a_fault() -> None:
    case = Case(TRAINED, steps=2)
    right = Seen(losses=[5.0] * 2, validation=[5.0])
    assert not list(loss_faults(Trained(case, [right], right)))
    wrong = replace(right, validation=[float("nan")])
    assert list(loss_faults(Trained(case, [wrong], right)))
