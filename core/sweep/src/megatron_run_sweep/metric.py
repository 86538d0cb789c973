"""The number by which the runs of a sweep are compared: as it is typed, checked before the first run where one can.

What every run has is known here. A model, the data or another plugin may add numbers, which only a run tells; so a
sweep ends after the first run that has none of that name, and goes on by the same command with another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches

from megatron_run.contracts.observer import EvalMetrics, StepMetrics
from megatron_run.errors import InputError
from megatron_run.errors.wording import LONGEST_WORD

#: What a metric is read from: the word before its name -> the file of a run.
FILES: Mapping[str, str] = {"eval": "eval.jsonl", "train": "metrics.jsonl"}
#: What lines have that compares nothing.
_NO_METRICS = frozenset({"v", "step", "attempt", "time", "split", "extra", "skipped", "resumed", "changes"})
#: The numbers that a line of every run has, by the word before their names.
ALWAYS: Mapping[str, tuple[str, ...]] = {
    source: tuple(each.name for each in fields(line) if each.name not in _NO_METRICS)
    for source, line in (("eval", EvalMetrics), ("train", StepMetrics))
}
#: How alike a name must be to one of those that it is refused as mistyped: "los" is, "lm_loss" and "losses" are not.
_MISTYPED = 0.85


@dataclass(frozen=True)
class Metric:
    """A number of a run: ``name`` in the lines of its evaluations on the validation split, or of its steps."""

    source: str
    name: str

    def __str__(self) -> str:
        return f"{self.source}.{self.name}"

    @property
    def is_certain(self) -> bool:
        """Whether every run has it; else a plugin may add it."""
        return self.name in ALWAYS[self.source]

    def among(self, names: Sequence[str]) -> str:
        """``names`` of the same lines, as they are typed."""
        return ", ".join(f"{self.source}.{name}" for name in names)


def read_metric(text: str) -> Metric:
    """``eval.loss`` or ``train.loss``; a name alone is one of ``eval``.

    Raises :class:`InputError` for no name, and for one that is nearly a name of what every run has.
    """
    first, _, rest = text.partition(".")
    found = Metric(first, rest) if first in FILES else Metric("eval", text)
    if not found.name:
        raise InputError(f"{text!r} is no metric", origin="--metric", fix="write eval.loss or train.loss")
    known = ALWAYS[found.source]
    near = get_close_matches(found.name[:LONGEST_WORD], known, n=1, cutoff=_MISTYPED)
    if near and not found.is_certain:
        raise InputError(
            f"there is no {found}",
            why=f"every run has {found.among(known)}",
            origin="--metric",
            fix=f"did you mean {found.among(near)}?",
        )
    return found


def is_number_of(name: str) -> bool:
    """Whether ``name`` in a line may be a metric."""
    return name not in _NO_METRICS


def without(metric: Metric, who: str, names: Sequence[str], *, drawn: bool) -> InputError:
    """The message where ``who``, as "run-000 has no", has no such number, but ``names``; ``drawn``: by a sampler."""
    why = f"there is {metric.among(names)}" if names else f"its {FILES[metric.source]} has no number"
    go_on = "begin another sweep with it: --folder NEW" if drawn else "the same command goes on with it"
    return InputError(f"{who} {metric}", why=why, origin="--metric", fix=f"name one that is there; {go_on}")
