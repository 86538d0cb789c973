"""Predictions beside measured steps: errors stay where they are, and the figures are what their names say."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner.tables import TABLES, measured, narayanan
from megatron_run.errors import InputError
from megatron_run_planner.accuracy import Accuracy, Compared, Measured, compare, needs_recompute, read_table, summarise
from megatron_run_planner.devices import LayerShape, read_device
from megatron_run_planner.schedules import Schedules
from megatron_run_planner.workload import ModelSplit, gpt2

A100 = read_device("a100")
MODEL = gpt2(24, 1024, 16, 1024, 51200)
HEADER = (TABLES / "a100_single.csv").read_text(encoding="utf-8").splitlines()[0]


@pytest.fixture(scope="module")
def schedules() -> Schedules:
    return Schedules()


def test_steps_in_one_machine_are_predicted(schedules: Schedules) -> None:
    found = compare(measured("single"), A100, schedules)
    assert found.mean_error < 0.02
    assert found.kendall > 0.97
    assert found.regret_mean < 0.005
    assert found.regret_max < 0.05


def test_steps_of_many_machines_are_predicted(schedules: Schedules) -> None:
    found = compare(measured("multi"), A100, schedules)
    assert found.mean_error < 0.08
    assert found.kendall > 0.5
    assert found.regret_max < 0.05


def test_a_published_table_is_predicted_by_the_same_constants(schedules: Schedules) -> None:
    assert compare(narayanan(), A100, schedules).mean_error < 0.03


def test_the_constants_alone_predict_shapes_that_were_not_measured(schedules: Schedules) -> None:
    alone = A100.model_copy(update={"layers": ()})
    assert compare(measured("single"), alone, schedules).mean_error < 0.07


def test_a_measured_shape_speaks_for_itself_and_for_no_distant_one() -> None:
    shape = A100.layers[0]
    assert A100.measured_ratio(LayerShape._make(shape[:5])) == pytest.approx((shape.ratio,) * 2, rel=0.02)
    far = LayerShape._make(shape[:5])._replace(hidden=shape.hidden * 8)
    assert A100.measured_ratio(far) == pytest.approx((1, 1), abs=1e-6)


def test_only_models_that_must_recompute_are_taken_to() -> None:
    assert {row.split.recompute for row in measured("single")} == {"none"}
    assert {row.split.recompute for row in measured("multi")} == {"full"}
    small = Measured(MODEL, ModelSplit(data=8, micro_batch=8, global_batch=128), 1.0)
    assert not needs_recompute(small, 80 * 2**30)
    assert needs_recompute(small, 16 * 2**30)


def compared(pairs: list[tuple[float, float]], hidden: int = 1024) -> tuple[Compared, ...]:
    """Rows of one task with the seconds (predicted, measured)."""
    row = Measured(gpt2(24, hidden, 16, 1024, 51200), ModelSplit(data=8, micro_batch=1, global_batch=64), 0.0)
    return tuple(Compared(replace(row, seconds=measured), predicted) for predicted, measured in pairs)


def test_regret_is_what_the_choice_costs() -> None:
    found = summarise(compared([(1.0, 1.2), (2.0, 1.0), (3.0, 3.0)]))
    assert list(found.regrets) == [pytest.approx(0.2)]
    assert found.mean_error == pytest.approx((1 / 6 + 1 + 0) / 3)


def test_tasks_are_judged_apart() -> None:
    rows = compared([(1.0, 1.0), (2.0, 2.0)]) + compared([(1.0, 3.0), (2.0, 2.0)], hidden=2048)
    found = summarise(rows)
    assert sorted(found.regrets) == [0, pytest.approx(0.5)]
    assert found.kendall == 0


@pytest.mark.parametrize("seed", range(5))
def test_rank_correlation_is_kendalls(seed: int) -> None:
    """Without ties, tau is 1 - 4 (discordant pairs) / n (n - 1): counted here by the inversions of a sorted list."""
    drawn = random.Random(seed)
    order = drawn.sample(range(12), 12)
    rows = compared([(float(place), float(value + 1)) for place, value in enumerate(order, 1)])
    swaps = sum(order[j] < order[i] for i in range(12) for j in range(i + 1, 12))
    assert summarise(rows).kendall == pytest.approx(1 - 4 * swaps / (12 * 11))


def test_no_choice_is_no_regret() -> None:
    alone = summarise(compared([(1.0, 2.0)]))
    assert (alone.regret_mean, alone.regret_max, alone.kendall) == (0, 0, 1)
    assert isinstance(alone, Accuracy)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        ("GPUs,batch\n1,2\n", "# gpus"),
        (HEADER + "\n", "no row"),
        (HEADER + "\n8,64,1,1024,16,24,1024,1,4,1,300\n", "GPUs"),
        (HEADER + "\n8,63,1,1024,16,24,1024,1,8,1,300\n", "divide"),
        (HEADER + "\n8,64,1,1024,16,24,1024,1,8,1,fast\n", ":2"),
        (HEADER + "\n8,64,1,1024,0.5,24,1024,1,8,1,300\n", "are no run"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, text: str, word: str) -> None:
    table = tmp_path / "table.csv"
    table.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=word):
        read_table(table, 51200, None, 1e12)


def test_a_device_with_a_mistake_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a100"):
        read_device("a10")
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nmemory: -1\n", encoding="utf-8")
    with pytest.raises(InputError, match="memory"):
        read_device(str(file))
