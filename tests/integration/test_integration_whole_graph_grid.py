"""``make graph-grid`` reports what it trained and what was wrong; here with little of its product."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_run.contracts import CaptureMetrics, CaptureSize
from megatron_run.contracts.schedule import Action, Op
from tests.integration import whole_graph_grid
from tests.integration.graph_grid import ALONE, NETWORKS, STEPS, WAYS, Case
from tests.integration.graph_grid_checks import Compared, bit_faults, byte_faults, capture_faults, number_faults
from tests.integration.whole_graph_grid import run
from tests.support.ranks import RankFailed
from tests.support.training import Seen

#: What runs of a microbatch, one after the other.
OPS: tuple[Op, ...] = ("F", "B")
CASE = Case(ALONE[0], NETWORKS[0], "fp32", WAYS[0])


@pytest.mark.nightly
@pytest.mark.multiproc
def test_the_page_counts_what_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([CASE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# Graph capture in every arrangement"
    assert "| sequential P1 V1 M3 | 1 | 1 | 1 | 1 | 1 | 10 | 1 |" in lines
    assert "- runs with graphs: 1, compared with 1 without" in lines
    assert "- faults: 0" in lines


def test_a_run_that_ends_with_an_error_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RankFailed("rank 0: it broke")

    monkeypatch.setattr(whole_graph_grid, "train_many", fail)
    assert run([CASE]) == 1
    seen = capsys.readouterr()
    assert "| sequential P1 V1 M3 | 1 | 1 | 0 | 0 | 0 | - | - |" in seen.out.splitlines()
    assert seen.err.splitlines()[-1] == "sequential P1 V1 M3: rank 0: it broke"


def seen(**changes: object) -> Seen:
    """What a run of ``CASE`` sees on its only rank: three microbatches, one after the other, by one recording."""
    size = CaptureSize(5, 2 * 5, 1, 100, 1000)
    plan = SimpleNamespace(
        layout=[SimpleNamespace(stage=0, chunk=0)],
        lists=[[Action(op, m, 0) for m in range(3) for op in OPS]],
    )
    right = Seen([5.0] * STEPS, [1.0] * STEPS, [5.0] * 2, plan=plan, weights="digest")
    right.captured = [CaptureMetrics(2, CaptureSize(5, 10, 1), size, 0.1)]
    return replace(right, **changes)  # type: ignore[arg-type]  # whatever a test changes


def test_what_is_right_has_no_fault() -> None:
    compared = Compared(CASE, [seen()], [seen()])
    assert not [*compared.faults(), *byte_faults({CASE: [seen()]})]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("losses", [5.0] * (STEPS - 1) + [5.0000001]),
        ("norms", [1.0] * (STEPS - 1) + [float("nan")]),
        ("validation", [5.0, 4.0]),
        ("weights", "another"),
    ],
)
def test_a_number_that_differs_is_a_fault(name: str, value: object) -> None:
    assert list(number_faults(Compared(CASE, [seen(**{name: value})], [seen()])))


def test_numbers_may_differ_a_little_only_where_additions_change_places() -> None:
    tied = replace(CASE, arrangement=ALONE[5], network=NETWORKS[1])
    assert (CASE.reordered, tied.reordered) == (False, True)
    right = seen(losses=[5.0] * (STEPS + 1), norms=[1.0] * (STEPS + 1))
    near, far = (replace(right, losses=[5.0] * STEPS + [5.0 + apart], weights="another") for apart in (1e-5, 1e-3))
    assert not list(number_faults(Compared(tied, [near], [right])))
    assert list(bit_faults(Compared(tied, [near], [right])))
    assert list(number_faults(Compared(tied, [far], [right])))


def test_numbers_that_nobody_can_compare_are_faults() -> None:
    assert list(number_faults(Compared(CASE, [seen(losses=[])], [seen(losses=[])])))
    assert list(number_faults(Compared(CASE, [seen(weights="")], [seen(weights="")])))
    infinite = seen(norms=[float("inf")] * STEPS)
    assert list(number_faults(Compared(CASE, [infinite], [infinite])))


@pytest.mark.parametrize(
    "said",
    [
        CaptureMetrics(3, CaptureSize(5, 10, 1), CaptureSize(5, 10, 1, 100, 1000), 0.1),
        CaptureMetrics(2, CaptureSize(5, 10, 1), CaptureSize(5, 8, 1, 100, 1000), 0.1),
        CaptureMetrics(2, CaptureSize(5, 10, 2), CaptureSize(5, 10, 2, 100, 1000), 0.1),
        CaptureMetrics(2, CaptureSize(5, 10, 1), CaptureSize(5, 10, 1, 0, 1000), 0.1),
    ],
    ids=["another step", "not as planned", "not the formula", "no inputs"],
)
def test_a_capture_that_is_not_what_it_should_be_is_a_fault(said: CaptureMetrics) -> None:
    assert list(capture_faults(Compared(CASE, [seen(captured=[said])], [seen()])))
    assert list(capture_faults(Compared(CASE, [seen(captured=[])], [seen()])))


def test_graphs_that_hold_more_when_chained_are_faults() -> None:
    def holding(static: int, pool: int) -> list[Seen]:
        return [seen(captured=[CaptureMetrics(2, CaptureSize(5, 10, 1), CaptureSize(5, 10, 1, static, pool), 0.1)])]

    copied = replace(CASE, way=WAYS[1])
    assert not list(byte_faults({CASE: holding(100, 1000), copied: holding(200, 1000)}))
    assert list(byte_faults({CASE: holding(300, 1000), copied: holding(200, 1000)}))
