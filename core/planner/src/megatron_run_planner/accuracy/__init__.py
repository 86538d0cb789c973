"""Compares predictions with measured steps: a table of runs in, errors, rank correlation and regret out.

A table is CSV with one run a row. Its columns are found by their names: ``# GPUs``, ``global batch``, ``micro batch``,
``hidden size``, ``attention heads``, ``# layers``, ``sequence length``, ``tensor parallelism``, ``data parallelism``,
``pipeline parallelism``, ``iteration time (ms)``; others are ignored.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from megatron_run.contracts.costs import ModelCosts
from megatron_run.contracts.model import MAX_LAYERS
from megatron_run.errors import InputError
from megatron_run.errors.wording import did_you_mean
from megatron_run.files.foreign_file import read_file
from megatron_run_planner.devices import Device
from megatron_run_planner.schedules import Schedules
from megatron_run_planner.step_time import step_time
from megatron_run_planner.workload import ModelSplit, Recompute, gpt2

#: What a column's name holds, and the quantity in it.
_COLUMNS = {
    "# gpus": "devices",
    "global batch": "global_batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "sequence",
    "tensor parallelism": "tensor",
    "data parallelism": "data",
    "pipeline parallelism": "pipeline",
    "iteration time (ms)": "milliseconds",
}
#: Bytes of parameters, gradients, masters and Adam's moments for a parameter in mixed precision.
_STATE = 18


@dataclass(frozen=True)
class Measured:
    """One row of a table: a run, and the ``seconds`` that a step of it took."""

    model: ModelCosts
    split: ModelSplit
    seconds: float

    @property
    def group(self) -> tuple[ModelCosts, int, int]:
        """Rows that are choices for one task: the same model, devices and global batch."""
        return self.model, self.split.ranks, self.split.global_batch


class Compared(NamedTuple):
    """A measured row and what was predicted for it, in seconds."""

    row: Measured
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.row.seconds - 1


@dataclass(frozen=True)
class Accuracy:
    """How well ``rows`` were predicted.

    ``mean_error`` is the mean of the absolute relative errors. ``kendall`` is the rank correlation tau-b of all pairs
    within each model and number of devices. ``regrets`` are, for each task with a choice, the measured time of the row
    that is predicted fastest over the best measured one, less 1.
    """

    rows: tuple[Compared, ...]
    mean_error: float
    kendall: float
    regrets: tuple[float, ...]

    @property
    def regret_mean(self) -> float:
        """The mean regret; 0 where no task has a choice."""
        return sum(self.regrets) / len(self.regrets) if self.regrets else 0.0

    @property
    def regret_max(self) -> float:
        """The largest regret."""
        return max(self.regrets, default=0.0)


def read_table(file: Path, vocabulary: int, recompute: Recompute | None, memory: float) -> list[Measured]:
    """The rows of ``file``. With ``recompute`` None it is inferred for each model (:func:`needs_recompute`).

    Raises :class:`InputError` for a file that cannot be read, a column that is missing, and a row that is no run.
    """
    try:
        lines = list(csv.reader(StringIO(read_file(file).decode("utf-8-sig"))))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file} cannot be read", why=str(error)) from None
    if not lines:
        raise InputError(f"{file} is empty", fix="the first line names the columns")
    names = [name.strip().lower() for name in lines[0]]
    for name in _COLUMNS:
        if name not in names:
            fix = did_you_mean(name, names) or f"the columns are {', '.join(_COLUMNS)}"
            raise InputError(f"{file} has no column {name!r}", fix=fix)
    where = {quantity: names.index(name) for name, quantity in _COLUMNS.items()}
    rows = [_row(file, number, line, where, vocabulary) for number, line in enumerate(lines[1:], 2) if any(line)]
    if not rows:
        raise InputError(f"{file} has no row")
    if recompute is not None:
        return [replace(row, split=replace(row.split, recompute=recompute)) for row in rows]
    smallest = min((row.model.weights for row in rows if needs_recompute(row, memory)), default=float("inf"))
    full: Recompute = "full"
    return [
        replace(row, split=replace(row.split, recompute=full)) if row.model.weights >= smallest else row for row in rows
    ]


def _row(file: Path, number: int, line: Sequence[str], where: dict[str, int], vocabulary: int) -> Measured:
    try:
        numbers = {quantity: float(line[index]) for quantity, index in where.items()}
        whole = {name: int(value) for name, value in numbers.items() if name != "milliseconds"}
    except (ValueError, IndexError, OverflowError):
        raise InputError(f"{file}:{number}: a column holds no number", fix="correct or remove the row") from None
    sizes = f"{file}:{number}: the sizes are no run"
    if min(*whole.values(), numbers["milliseconds"]) <= 0 or whole["layers"] > MAX_LAYERS:
        raise InputError(sizes, fix=f"all are above 0, and layers at most {MAX_LAYERS}")
    model = gpt2(whole["layers"], whole["hidden"], whole["heads"], whole["sequence"], vocabulary)
    split = ModelSplit(
        tensor=whole["tensor"],
        pipeline=whole["pipeline"],
        data=whole["data"],
        micro_batch=whole["micro_batch"],
        global_batch=whole["global_batch"],
        scatter_messages=True,  # as Megatron-LM and DeepSpeed send them
    )
    if split.ranks != whole["devices"]:
        raise InputError(sizes, fix="tensor x pipeline x data must be the number of GPUs")
    if split.global_batch % (split.micro_batch * split.data) or split.pipeline > len(model.layers):
        raise InputError(sizes, fix="batches and layers must divide")
    return Measured(model, split, numbers["milliseconds"] / 1000)


def needs_recompute(row: Measured, memory: float) -> bool:
    """Whether ``row`` would not fit into ``memory`` bytes with all activations kept.

    A table's runs share their settings: where one run of a model must recompute, all runs of that model and of larger
    ones do. Activations are s b h (10 + 24/t + 5 a s / h t) bytes a layer (Korthikanti et al. 2022, equation 2), of as
    many microbatches as 1F1B has in flight on its first stage. Where the state alone is too large, it was sharded, and
    nothing follows.
    """
    model, split = row.model, row.split
    tokens, heads = split.micro_batch * model.sequence * model.hidden, model.layers[0].attentions[0].heads
    layer = tokens * (10 + 24 / split.tensor + 5 * heads * model.sequence / model.hidden / split.tensor)
    in_flight = min(split.pipeline, split.microbatches)
    state = _STATE * model.weights / (split.tensor * split.pipeline)
    return state < memory < state + layer * len(model.layers) / split.pipeline * in_flight


def compare(rows: Iterable[Measured], device: Device, schedules: Schedules) -> Accuracy:
    """Predict every row, as 1F1B runs it."""
    compared = tuple(Compared(row, predict(row, device, schedules)) for row in rows)
    return summarise(compared)


def predict(row: Measured, device: Device, schedules: Schedules) -> float:
    """Seconds of a step of ``row``."""
    split = row.split
    kind = "sequential" if split.pipeline == 1 else "interleaved" if split.chunks > 1 else "1f1b"
    plan = schedules.plan(kind, len(row.model.layers), split.pipeline, split.chunks, split.microbatches)
    return step_time(row.model, split, device, plan).seconds


def summarise(compared: tuple[Compared, ...]) -> Accuracy:
    """Errors, rank correlation and regrets of ``compared``, one row at least."""
    machines, tasks = defaultdict(list), defaultdict(list)
    for each in compared:
        machines[each.row.group[:2]].append(each)
        tasks[each.row.group].append(each)
    regrets = tuple(_regret(each) for each in tasks.values() if len(each) > 1)
    mean = sum(abs(each.error) for each in compared) / len(compared)
    return Accuracy(compared, mean, kendall(machines.values()), regrets)


def _regret(task: Sequence[Compared]) -> float:
    chosen = min(task, key=lambda each: each.predicted)
    return chosen.row.seconds / min(each.row.seconds for each in task) - 1


def kendall(groups: Iterable[Sequence[Compared]]) -> float:
    """Kendall's tau-b over the pairs within each group; 1 where there is no pair."""
    balance = one = other = 0
    for group in groups:
        for a, b in combinations(group, 2):
            left = (a.predicted > b.predicted) - (a.predicted < b.predicted)
            right = (a.row.seconds > b.row.seconds) - (a.row.seconds < b.row.seconds)
            balance += left * right
            one, other = one + abs(left), other + abs(right)
    return balance / (one * other) ** 0.5 if one and other else 1.0
