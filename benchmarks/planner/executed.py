"""Steps of real runs on this machine beside what the planner predicts of them after calibrating on it.

Calibration and runs take turns by their number of ranks, in rounds over everything, so that a disturbance hits no
single one and both see the same machine; the calibration has trainings of its own and looks at none of these. A step's
time is the typical one of the steps of all rounds, as in the calibration. Predicted is the step time that `plan` gives
for the very request. How well half of the rounds predict the other half is what no prediction can surpass. The order of
actions is compared on every rank, and between ranks wherever one action ended before another began.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.planner.configuration import FULL, HALF, SPLIT, Configuration, sized, stages
from benchmarks.planner.picture import Scale, picture
from benchmarks.support.report import heading, table
from megatron_run_engine.estimate.calibration.on_ranks import RankCall as Measurement
from megatron_run_engine.estimate.calibration.on_ranks import on_ranks
from megatron_run_engine.estimate.calibration.survey import (
    Round,
    read_round,
    slowest,
    step_seconds,
    surveyed,
    tasks,
)
from megatron_run_engine.estimate.calibration.timed_run import time_request
from megatron_run_engine.host.process import processor_name
from megatron_run_planner.accuracy import Accuracy, Compared, Measured, kendall, summarise
from megatron_run_planner.accuracy.calibrate import Survey, describe, device_text
from megatron_run_planner.devices import Device, read_device
from megatron_run_planner.schedules import Schedules
from megatron_run_planner.step_time import place_times, simulated, step_time
from megatron_run_planner.task import read_task

RESULTS = Path(__file__).parents[1] / "results"
#: Rounds over all configurations, and steps of a run that are timed.
ROUNDS, STEPS = 4, 6
EXPERTS = {"model.experts.count": 4}
#: Their steps differ by a factor of 1.1 on average and of 20 in all, so that an order can be kept or lost.
CONFIGURATIONS = (
    Configuration(1, (), sized(128, 4, 64, 1, 4, layers=3)),
    Configuration(1, (), sized(128, 4, 128, 1, 3)),
    Configuration(1, (), sized(192, 6, 64, 4, 20)),
    Configuration(1, (), sized(512, 8, 64, 2, 4, layers=2)),
    Configuration(1, (), sized(384, 6, 128, 1, 9)),
    Configuration(1, (), sized(256, 8, 128, 2, 32)),
    Configuration(1, (), sized(128, 4, 256, 1, 16, layers=6)),
    Configuration(1, (), sized(128, 4, 128, 2, 4) | FULL),
    Configuration(1, (), sized(256, 4, 128, 2, 16, layers=5) | HALF),
    Configuration(1, (), sized(128, 4, 128, 2, 12) | EXPERTS),
    Configuration(1, (), sized(128, 4, 128, 2, 8) | {"data.vocab_size": 8192}),
    Configuration(2, ("schedule=1f1b",), stages(2) | sized(128, 4, 64, 2, 4)),
    Configuration(2, ("schedule=1f1b",), stages(2) | sized(256, 4, 128, 1, 24)),
    Configuration(2, ("schedule=gpipe",), stages(2) | sized(192, 6, batch=16)),
    Configuration(2, ("schedule=interleaved",), stages(2, chunks=2) | sized(128, 4, 128, 2, 24)),
    Configuration(2, ("schedule=zero-bubble",), stages(2) | sized(128, 4, 128, 2, 8)),
    Configuration(2, ("schedule=1f1b",), stages(2) | sized(192, 6, 128, 2, 16, layers=6) | FULL),
    Configuration(2, (SPLIT,), {"parallel.tensor": 2} | sized(128, 4, 128, 1, 4, layers=2)),
    Configuration(2, (SPLIT,), {"parallel.tensor": 2} | sized(384, 8, 128, 1, 10)),
    Configuration(2, (SPLIT,), {"parallel.tensor": 2} | sized(128, 4, 128, 2, 12) | FULL),
    Configuration(2, (), {"parallel.data": 2} | sized(128, 4, 128, 2, 8)),
    Configuration(2, (), {"parallel.data": 2} | sized(256, 8, 64, 4, 16)),
    Configuration(2, ("optimizer=zero1",), {"parallel.data": 2} | sized(384, 6, 64, 2, 12)),
    Configuration(2, (), {"parallel.data": 2, "parallel.expert": 2} | sized(128, 4, 128, 2, 12) | EXPERTS),
    Configuration(4, ("schedule=1f1b",), stages(4) | sized(128, 4, 128, 2, 8)),
    Configuration(4, ("schedule=gpipe",), stages(4) | sized(256, 4, 64, 2, 16)),
    Configuration(4, ("schedule=zero-bubble",), stages(4) | sized(192, 6, 128, 2, 32)),
    Configuration(4, ("schedule=interleaved",), stages(4, chunks=2) | sized(256, 4, 128, 1, 20, layers=8)),
    Configuration(4, (SPLIT,), {"parallel.tensor": 4} | sized(256, 8, 128, 2, 10)),
    Configuration(4, (), {"parallel.data": 4} | sized(192, 6, batch=24)),
    Configuration(4, ("optimizer=zero1",), {"parallel.data": 4} | sized(256, 8, 64, 2, 32)),
    Configuration(4, (SPLIT, "schedule=1f1b"), stages(2, tensor=2) | sized(256, 8, batch=16)),
    Configuration(4, ("schedule=1f1b",), stages(2, data=2) | sized(128, 4, batch=16)),
    Configuration(4, (SPLIT,), {"parallel.tensor": 2, "parallel.data": 2} | sized(384, 6, batch=20)),
    Configuration(4, ("schedule=1f1b",), stages(2, data=2) | sized(256, 4, 64, 2, 32) | FULL),
)


class Executed(NamedTuple):
    """The measurement of a configuration: seconds of the steps of each round, and one step's actions of each rank."""

    rounds: list[list[float]]
    actions: list[list[tuple[str, float, float]]]


class Judged(NamedTuple):
    """A configuration executed and predicted. ``ordered``: every rank ran its actions in the simulated order.

    ``agreeing``: of pairs of actions of different stages of which one ended before the other began, the share that the
    simulation has in the same order. ``halves`` are the seconds of a step by every other round, and by those between.
    """

    configuration: Configuration
    compared: Compared
    spread: float
    halves: tuple[float, float]
    ordered: bool
    agreeing: float


def measure(
    chosen: Sequence[Configuration], rounds: int, calibration: Sequence[Measurement]
) -> tuple[list[Round], list[Executed]]:
    """The findings of each round on the machine, if ``calibration`` has anything, and of each configuration."""
    runs = [
        Measurement(each.ranks, time_request, {"request": each.request.to_json(), "steps": STEPS}) for each in chosen
    ]
    tasks = [*calibration, *runs]
    order = sorted(range(len(tasks)), key=lambda index: tasks[index].ranks)  # a calibration beside what it predicts
    measured, executed = list[Round](), [Executed([], []) for _ in chosen]
    for number in range(1, rounds + 1):
        print(f"measuring, round {number} of {rounds}", flush=True)
        found = dict(zip(order, on_ranks([tasks[index] for index in order]), strict=True))
        results = [found[index] for index in range(len(tasks))]
        if calibration:
            measured.append(read_round(results[: len(calibration)]))
        for ranks, into in zip(results[len(calibration) :], executed, strict=True):
            into.rounds.append(slowest([each["wall"] for each in ranks]))
            into.actions[:] = [each["actions"][-1] for each in ranks]
    return measured, executed


def judge(configuration: Configuration, executed: Executed, device: Device, schedules: Schedules) -> Judged:
    """Compare one configuration with what the planner says of it."""
    task = read_task(configuration.request, configuration.ranks)
    split = task.split
    plan = schedules.plan(task.schedule, len(task.model.layers), split.pipeline, split.chunks, split.microbatches)
    seconds = step_seconds(executed.rounds)
    row = Measured(task.model, split, seconds)
    compared = Compared(row, step_time(task.model, split, device, plan).seconds)
    ends = simulated(place_times(task.model, split, device, plan.layout), task.model, split, device, plan)
    per_stage = split.tensor * split.data
    ordered = all(
        [name for name, _, _ in actions] == [str(action) for action in plan.lists[rank // per_stage]]
        for rank, actions in enumerate(executed.actions)
    )
    firsts = executed.actions[::per_stage]
    each_round = [step_seconds([steps]) for steps in executed.rounds]
    halves = tuple(step_seconds(executed.rounds[start::2] or executed.rounds) for start in (0, 1))
    return Judged(
        configuration,
        compared,
        max(each_round) / min(each_round) - 1,
        (halves[0], halves[1]),
        ordered and len(ends) == len(firsts),
        agreement(firsts, ends),
    )


def agreement(stages: Sequence[Sequence[tuple[str, float, float]]], ends: Sequence[Sequence[float]]) -> float:
    """Of pairs across stages that the execution orders, the share that the simulated ends order alike."""
    alike = total = 0
    for one, other in combinations(range(len(stages)), 2):
        for (_, start, end), simulated_end in zip(stages[one], ends[one], strict=True):
            for (_, begin, close), simulated_close in zip(stages[other], ends[other], strict=True):
                if end <= begin or close <= start:
                    total += 1
                    alike += (end <= begin) == (simulated_end <= simulated_close + 1e-9)
    return alike / total if total else 1.0


def report(found: Sequence[Judged], device: Device, rounds: int) -> Iterator[str]:
    """The summary, and a line a configuration."""
    errors = [abs(each.compared.error) for each in found]
    tau = kendall([[each.compared for each in found]])
    within = sum(error <= 0.1 for error in errors)
    yield ""
    yield (
        f"{len(found)} configurations, {rounds} rounds: mean error {sum(errors) / len(errors):.1%}, worst "
        f"{max(errors):.1%}, {within} within 10%; Kendall's tau {tau:.3f}; order of actions equal on every rank in "
        f"{sum(each.ordered for each in found)}."
    )
    same = floor(found)
    yield (
        f"Half of the rounds as a prediction of the other half: mean error {same.mean_error:.1%}, worst "
        f"{max(abs(each.error) for each in same.rows):.1%}; Kendall's tau {kendall([same.rows]):.3f}."
    )
    yield f"Device: {device.name}, one thread a rank."
    yield ""
    rows = [
        (
            each.configuration.name,
            f"{each.compared.row.seconds * 1e3:.1f}",
            f"{each.compared.predicted * 1e3:.1f}",
            f"{each.compared.error:+.1%}",
            f"{each.spread:.1%}",
            "yes" if each.ordered else "no",
            f"{each.agreeing:.1%}",
        )
        for each in found
    ]
    columns = ("run", "executed ms", "predicted ms", "error", "spread of rounds", "same order", "between ranks")
    yield from table(columns, rows)


def floor(found: Sequence[Judged]) -> Accuracy:
    """One half of the rounds predicted by the other: the same runs on the same machine, predicted perfectly."""
    return summarise(
        tuple(Compared(replace(each.compared.row, seconds=each.halves[1]), each.halves[0]) for each in found)
    )


def record(found: Sequence[Judged], device: Device, rounds: int) -> dict[str, Any]:
    """The same as data."""
    errors = [abs(each.compared.error) for each in found]
    return {
        "device": device.model_dump(exclude_none=True),
        "rounds": rounds,
        "mean_error": sum(errors) / len(errors),
        "worst_error": max(errors),
        "kendall": kendall([[each.compared for each in found]]),
        "rows": [
            {
                "run": each.configuration.name,
                "executed": each.compared.row.seconds,
                "predicted": each.compared.predicted,
                "error": each.compared.error,
                "spread": each.spread,
                "halves": each.halves,
                "same_order": each.ordered,
                "between_ranks": each.agreeing,
                "split": asdict(each.compared.row.split),
            }
            for each in found
        ],
    }


def main(words: Sequence[str], *, quick: bool, only: str, device_file: Path | None, output: Path | None) -> None:
    """Calibrate unless there is a description, execute, compare, and write ``planner_executed`` where asked.

    Of the configurations those whose names match ``only`` are taken, a regular expression.
    """
    rounds = 1 if quick else ROUNDS
    chosen = [each for each in CONFIGURATIONS[:: 4 if quick else 1] if re.search(only, each.name)]
    if not chosen:
        raise SystemExit(f"no run is named like {only!r}")
    measured, executed = measure(chosen, rounds, tasks() if device_file is None else [])
    if measured:
        survey = Survey(**surveyed(measured))
        device = describe(survey, f"one of {survey.cores} cores of {processor_name()}")
    else:
        device = read_device(str(device_file))
    schedules = Schedules()
    found = [judge(*pair, device, schedules) for pair in zip(chosen, executed, strict=True)]
    text = [*heading("Executed against predicted steps", words), *report(found, device, rounds)]
    print("\n".join(text))
    if output:
        output.mkdir(parents=True, exist_ok=True)
        whole = {"this machine": summary_of(found)}
        (output / "planner_executed.md").write_text("\n".join(text) + "\n", "utf-8")
        (output / "planner_executed.json").write_text(
            json.dumps(record(found, device, rounds), indent=1) + "\n", "utf-8"
        )
        scale = Scale(0.005, 2.0, (0.01, 0.1, 1.0))
        (output / "planner_executed.svg").write_text(picture(whole, scale), "utf-8")
        (output / "planner_executed_device.yaml").write_text(
            device_text(device, "As calibrated between the runs."), "utf-8"
        )


def summary_of(found: Sequence[Judged]) -> Accuracy:
    """The rows as the planner's own summary."""
    return summarise(tuple(each.compared for each in found))
