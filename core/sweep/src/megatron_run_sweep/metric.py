"""The number by which the runs of a sweep are compared, as it is typed.

Only a run tells which numbers there are: a model, the data or another plugin may add some, and data may have no
validation split. So a sweep ends after the first run that has none of that name, and goes on with another by the same
command.
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
#: The fields that every line has, by the word before their names; one may be null, as ``mfu`` of an unknown device.
ALWAYS: Mapping[str, tuple[str, ...]] = {
    source: tuple(each.name for each in fields(line) if each.name not in _NO_METRICS)
    for source, line in (("eval", EvalMetrics), ("train", StepMetrics))
}
#: How alike a name must be to one of those that it is told as maybe mistyped: "los" is, "lm_loss" and "losses" are not.
_MISTYPED = 0.85


@dataclass(frozen=True)
class Metric:
    """A number of a run: ``name`` in the lines of its evaluations on the validation split, or of its steps."""

    source: str
    name: str

    def __str__(self) -> str:
        return f"{self.source}.{self.name}"

    @property
    def doubt(self) -> str:
        """A line where it is nearly a field of every line, and so maybe mistyped; else empty."""
        known = ALWAYS[self.source]
        if self.name in known:
            return ""
        near = get_close_matches(self.name[:LONGEST_WORD], known, n=1, cutoff=_MISTYPED)
        if not near:
            return ""
        return f"{self} is not among what every line has, {self.among(known)}; did you mean {self.among(near)}?"

    def among(self, names: Sequence[str]) -> str:
        """``names`` of the same lines, as they are typed."""
        return ", ".join(f"{self.source}.{name}" for name in names)


def read_metric(text: str) -> Metric:
    """``eval.loss`` or ``train.loss``; a name alone is one of ``eval``.

    Raises :class:`InputError` for no name.
    """
    first, _, rest = text.partition(".")
    found = Metric(first, rest) if first in FILES else Metric("eval", text)
    if not found.name:
        raise InputError(f"{text!r} is no metric", origin="--metric", fix="write eval.loss or train.loss")
    return found


def is_number_of(name: str) -> bool:
    """Whether ``name`` in a line may be a metric."""
    return name not in _NO_METRICS


def without(metric: Metric, who: str, names: Sequence[str], *, drawn: bool) -> InputError:
    """The message where ``who``, as "run-000 has no", has no such number, but ``names``; ``drawn``: by a sampler."""
    go_on = "begin another sweep with it: --folder NEW" if drawn else "the same command goes on with it"
    fix = "name one that is there"
    if metric.name in names:
        why, fix = "its last value is null or not finite", "name another"
    elif names:
        why = f"there is {metric.among(names)}"
    else:
        why = f"its {FILES[metric.source]} has no number"
        fix = "name one of the steps, as train.loss" if metric.source == "eval" else fix
    return InputError(f"{who} {metric}", why=why, origin="--metric", fix=f"{fix}; {go_on}")
