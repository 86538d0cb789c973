"""The few numbers by which runs are judged and compared, and the keys in which they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_run.config.values import typed
from megatron_run.drawing.curve import At, Curve
from megatron_run.errors.wording import duration
from megatron_run_engine.run_folder.curves import Thinned
from megatron_run_report.record import Record

#: Keys that differ between any two runs, and change nothing that is learned.
_PLACES = frozenset({"run.folder"})
#: The most characters of a value in a table.
_LONGEST = 60


@dataclass(frozen=True)
class Summary:
    """One run in numbers; None where it does not tell.

    Losses are in nats per token, ``peak_gib`` is that of rank 0's device (on the CPU: its process), ``seconds`` the
    time from the first step to the last, waiting between attempts included.
    """

    run: str
    folder: str
    state: str
    step: int | None
    steps: int | None
    loss: float | None
    best_loss: float | None
    best_step: int | None
    tokens: float | None
    tokens_per_s: float | None
    step_s: float | None
    peak_gib: float | None
    mfu: float | None
    skipped: int
    ranks: int | None
    attempts: int
    seconds: float | None

    def as_data(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


def summary(record: Record) -> Summary:
    """The numbers of one run."""
    metrics, curves = record.metrics, record.metrics.curves
    best = best_evaluation(record.evaluations.get("validation"))
    status = record.status
    steps = record.keys.get("train.steps")
    last = curves["loss"].last.step if "loss" in curves else None
    topology = record.plan.get("topology")
    world = topology.get("world") if isinstance(topology, dict) else None
    spent = None if metrics.begin is None or metrics.end is None else max(0.0, metrics.end - metrics.begin)
    return Summary(
        run=record.name,
        folder=str(record.folder),
        state=str(status.state) if status else "unknown",
        step=status.step if status and type(status.step) is int else last,
        steps=steps if type(steps) is int else None,
        loss=last_value(curves.get("loss")),
        best_loss=best.value if best else None,
        best_step=best.step if best else None,
        tokens=last_value(curves.get("tokens")),
        tokens_per_s=settled(curves.get("tokens_per_s")),
        step_s=settled(curves.get("step_time_s")),
        peak_gib=curves["memory_peak_gib"].highest.value if "memory_peak_gib" in curves else None,
        mfu=settled(curves.get("mfu")),
        skipped=int(last_value(curves.get("skipped_total")) or 0),
        ranks=world if type(world) is int else None,
        attempts=len(record.attempts),
        seconds=spent,
    )


def best_evaluation(found: Thinned | None) -> At | None:
    """The lowest loss of a split; None where it was never evaluated."""
    curve = found.curves.get("loss") if found else None
    return curve.lowest if curve else None


def last_value(curve: Curve | None) -> float | None:
    """The last value of a curve that is there."""
    return curve.last.value if curve else None


def settled(curve: Curve | None) -> float | None:
    """The median of a curve's points: the first steps, which compile and warm up, do not count for much."""
    if curve is None:
        return None
    means = sorted(point.mean for point in curve.points)
    return means[len(means) // 2]


def differences(records: Sequence[Record]) -> dict[str, list[str]]:
    """The keys whose values differ among the runs, each with its value in every run; "" where a run has no such key."""
    names = sorted({name for record in records for name in record.keys} - _PLACES)
    missing = object()
    found = {}
    for name in names:
        values = [record.keys.get(name, missing) for record in records]
        if any(value != values[0] for value in values):
            found[name] = ["" if value is missing else short(value) for value in values]
    return found


def short(value: object, longest: int = _LONGEST) -> str:
    """A value for a cell."""
    text = f"{value:.6g}" if isinstance(value, float) else typed(value)
    return text if len(text) <= longest else f"{text[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"


def amount(value: float | None) -> str:
    """``12.3k``: up to four digits and a unit of thousands; an empty text for None."""
    if value is None:
        return ""
    if abs(value) < 1e-3:
        return f"{value:.3g}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"


def lines_of(each: Summary) -> Mapping[str, str]:
    """The numbers of a run in words, by what they are."""
    of = f" of {each.steps:,}" if each.steps else ""
    at = "" if each.best_step is None else f" at step {each.best_step:,}"
    found = {
        "state": each.state,
        "step": "" if each.step is None else f"{each.step:,}{of}",
        "training loss (nats per token), last": "" if each.loss is None else f"{each.loss:.4f}",
        "validation loss, best": "" if each.best_loss is None else f"{each.best_loss:.4f}{at}",
        "tokens": amount(each.tokens),
        "tokens per second, median": amount(each.tokens_per_s),
        "seconds per step, median": amount(each.step_s),
        "model FLOPs utilisation, median": "" if each.mfu is None else f"{each.mfu:.1%}",
        "peak memory of rank 0": "" if each.peak_gib is None else f"{each.peak_gib:.3g} GiB",
        "skipped steps": f"{each.skipped:,}",
        "ranks": "" if each.ranks is None else f"{each.ranks:,}",
        "attempts": str(each.attempts),
        "time from first to last step": "" if each.seconds is None else duration(each.seconds),
    }
    return {name: text for name, text in found.items() if text}


#: The columns of the table in a terminal.
HEAD = ("run", "state", "step", "loss", "best", "at", "tokens/s", "s/step", "peak GiB", "ranks", "time")


def row_of(each: Summary) -> tuple[str, ...]:
    """The numbers of a run under :data:`HEAD`."""
    return (
        short(each.run, 40),
        each.state,
        "" if each.step is None else str(each.step),
        "" if each.loss is None else f"{each.loss:.4f}",
        "" if each.best_loss is None else f"{each.best_loss:.4f}",
        "" if each.best_step is None else str(each.best_step),
        amount(each.tokens_per_s),
        amount(each.step_s),
        "" if each.peak_gib is None else f"{each.peak_gib:.3g}",
        "" if each.ranks is None else str(each.ranks),
        "" if each.seconds is None else duration(each.seconds),
    )
