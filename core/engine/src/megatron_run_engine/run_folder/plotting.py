"""The curves of runs as a picture: what each quantity is called, how it is drawn, and which are shown unasked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_run.drawing.chart import How, Line, chart
from megatron_run.drawing.curve import Curve
from megatron_run.drawing.sheet import LETTERS, Picture, Titled, sheet
from megatron_run.errors import InputError
from megatron_run.errors.wording import did_you_mean, near_path
from megatron_run.files.latest_run import follow_latest
from megatron_run.files.run_names import shown_name
from megatron_run_engine.run_folder.curves import read_evaluations, read_metrics


class Kind(NamedTuple):
    """A curve's title, the unit of its values, how it is drawn, whether their logarithm may be, and that 0 is shown."""

    title: str
    unit: str
    how: How = "noise"
    may_log: bool = True
    from_zero: bool = False


class Found(NamedTuple):
    """A curve of a run, and its kind, which the file decides that it lies in."""

    kind: Kind
    curve: Curve


#: The curves of every run, by field, in the order in which they are shown.
QUANTITIES: Mapping[str, Kind] = {
    "loss": Kind("Training loss", "nats per token"),
    "grad_norm": Kind("Gradient norm, before clipping", "norm"),
    "lr": Kind("Learning rate", "rate", "plain", may_log=False),
    "tokens_per_s": Kind("Throughput", "tokens per second"),
    "step_time_s": Kind("Time of a step", "seconds"),
    "memory_peak_gib": Kind("Peak memory of rank 0", "GiB", "plain", may_log=False, from_zero=True),
    "tflops_per_device": Kind("Arithmetic per device", "TFLOP/s"),
    "mfu": Kind("Model FLOPs utilisation", "share of the peak", may_log=False),
    "loss_scale": Kind("Loss scale", "factor", "plain"),
    "skipped_total": Kind("Skipped steps", "steps so far", "plain", may_log=False),
}
#: What is shown unless something is asked for.
SHOWN = ("loss", "validation.loss", "lr", "grad_norm", "tokens_per_s")
#: Charts beside each other.
_COLUMNS = 2


def evaluation_kind(split: str, name: str) -> Kind:
    """The kind of the number ``name`` of evaluations on ``split``, which may be a task."""
    title = f"{split} {name.replace('_', ' ')}".capitalize()
    return Kind(title, "nats per token" if name == "loss" else name, "mark")


def plot(folders: Sequence[Path], names: Sequence[str] = ()) -> Picture:
    """A chart for each of ``names``, a field of ``metrics.jsonl``, or SPLIT.NAME of ``eval.jsonl``, of all runs in one.

    Without names it is :data:`SHOWN`, as far as it is there; the losses of one run alone share a chart. Raises
    :class:`InputError` for a folder without numbers, too many runs, and a name that no run has.
    """
    if len(folders) > len(LETTERS):
        raise InputError(f"{len(folders)} runs in one picture", why=f"it holds {len(LETTERS)}", fix="leave some out")
    runs = [_curves(follow_latest(folder.expanduser())) for folder in folders]
    known = {name: None for run in runs for name in run}
    for name in names:
        if name not in known:
            fix = did_you_mean(name, known) or f"name one of {', '.join(known)}"
            raise InputError(f"there is no curve {name!r}", fix=fix)
    charts = [*_charts(runs, names or [name for name in SHOWN if name in known], apart=bool(names))]
    titles = [shown_name(follow_latest(folder.expanduser())) for folder in folders]
    return Picture(sheet(charts, _COLUMNS, titles if len(runs) > 1 else ()), f"curves of {' and '.join(titles)}")


def _curves(folder: Path) -> dict[str, Found]:
    """All curves of the run in ``folder``; of evaluations are those of ``eval.jsonl``, whatever a field is called."""
    found = {
        name: Found(QUANTITIES.get(name, Kind(name, "")), curve) for name, curve in read_metrics(folder).curves.items()
    }
    for split, thinned in read_evaluations(folder).items():
        for name, curve in thinned.curves.items():
            found[f"{split}.{name}"] = Found(evaluation_kind(split, name), curve)
    if not found:
        there = folder.is_dir()
        why = "no step is in its metrics.jsonl" if there else "there is no such folder"
        fix = "train with observer jsonl, which is on unless observer.use is set" if there else near_path(folder)
        raise InputError(f"{folder} has no curves", why=why, fix=fix or "name a run folder, as runs/latest")
    return found


def _charts(runs: Sequence[Mapping[str, Found]], names: Sequence[str], *, apart: bool) -> Iterator[Titled]:
    joined = not apart and len(runs) == 1 and {"loss", "validation.loss"} <= runs[0].keys()
    for name in names:
        kind = next(run[name].kind for run in runs if name in run)
        lines = [
            Line(index, LETTERS[index] if len(runs) > 1 else "", run[name].curve, run[name].kind.how)
            for index, run in enumerate(runs)
            if name in run
        ]
        if joined and name == "validation.loss":
            continue
        if joined and name == "loss":
            kind = kind._replace(title="Loss in training, and of validation (squares)")
            lines.append(Line(1, "", runs[0]["validation.loss"].curve, "mark"))
        picture = chart(kind.title, kind.unit, lines, may_log=kind.may_log, from_zero=kind.from_zero)
        yield Titled(kind.title, picture)
