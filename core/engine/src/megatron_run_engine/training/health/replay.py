"""Tells a faulty rank from a faulty program where copies differ: the steps since the last saved one are done again.

The run goes back to a step whose copies were equal, and does the same steps with the same samples. A sound rank then
has the same bits again, but for what others have sent it: one wrong weight reaches every rank with the next gradients,
so that in the end all may differ from what they were. So each rank notes the bits of its weights in each step, as the
step has used them, before they are updated. The rank whose notes differ first is at fault: nobody has heard of its
weights yet. If no rank's notes differ, the program makes the copies differ, or a fault that repeats to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_run.contracts import Lender
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.collectives import on_rank0
from megatron_run_engine.runtime.parameter_init import has_memory
from megatron_run_engine.training.health.replicas import bit_sum, ranks_text

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.training.build import Assembly
    from megatron_run_engine.training.health.replicas import Difference
    from megatron_run_engine.training.numbers import Progress
    from megatron_run_engine.training.state.checkpointing import Checkpointing

#: A step, and whether the weights are those that it has made, rather than those that it has used.
Moment = tuple[int, bool]


class Finding(NamedTuple):
    """The ranks that are ``faulty``, none where that cannot be told, and the step ``since`` which they differ.

    ``repeats``: every rank came to the same weights again.
    """

    faulty: tuple[int, ...] = ()
    since: int = 0
    repeats: bool = False


@dataclass(frozen=True)
class Verdict:
    """The finding about the copies ``found`` to differ after ``step``, once all since ``back`` was done again."""

    step: int
    found: Difference
    back: int
    faulty: tuple[int, ...]
    since: int
    repeats: bool

    def __str__(self) -> str:
        if self.faulty:
            verb = "has" if len(self.faulty) == 1 else "have"
            what = f"{ranks_text(self.faulty)} alone {verb} other weights than before, since step {self.since}"
        else:
            what = "every rank has the same weights again" if self.repeats else "no rank alone has others than before"
        return f"done again from step {self.back}, {what}"


class _Doubt(NamedTuple):
    """The difference ``found`` after ``step`` at first, with the notes until then; all since ``back`` is done again."""

    step: int
    found: Difference
    back: int
    notes: Mapping[Moment, int]


class Replay:
    """The notes of this rank since the last saved step, and what is being done again."""

    def __init__(self, assembly: Assembly, ranks: Ranks) -> None:
        self._ranks, self._device, self._log = ranks, assembly.context.device, assembly.context.log
        #: What is lent has no memory yet: its shares are noted, and not whether it happens to be whole.
        self._whole = [each for described in assembly.infos for each in described if has_memory(each)]
        self._lender = assembly.optimizer if isinstance(assembly.optimizer, Lender) else None
        self._notes: dict[Moment, Tensor] = {}
        self._doubt: _Doubt | None = None

    def note(self, step: int, *, made: bool = False) -> None:
        """Note the weights that ``step`` uses, or has ``made``. The host does not wait for the device."""
        shares = [] if self._lender is None else [values for values, _ in self._lender.kept()]
        self._notes[step, made] = bit_sum([*self._whole, *shares], self._device)

    def saving(self) -> None:
        """The step that was compared is about to be saved: what was before is of no use any more."""
        self._notes.clear()

    def begin(self, progress: Progress, found: Difference, checkpoints: Checkpointing) -> Progress | None:
        """Go back to the last saved step, because of what was ``found``: the progress there.

        None where nothing is saved that can be read, and where the run has dropped samples since. Collective.
        """
        try:
            back = checkpoints.reload_newest(from_memory=True)
        except CheckpointError as error:  # on every rank; the run stops for what was found, which explains more
            self._log.warning("no step can be done again: %s", error)
            return None
        if back is None or back.rewinds != progress.rewinds:
            return None
        self._doubt = _Doubt(progress.step, found, back.step, _to_host(self._notes))
        self._notes.clear()
        return back

    def verdict(self, progress: Progress, again: Difference | None) -> Verdict | None:
        """The outcome of the steps done again, once they all are, or copies differ ``again``; else None. Collective."""
        doubt = self._doubt
        if doubt is None or (again is None and progress.step < doubt.step):
            return None
        notes = _to_host(self._notes)
        differing = (moment for moment, bits in sorted(notes.items()) if doubt.notes.get(moment, bits) != bits)
        firsts = self._ranks.gather(json.dumps(next(differing, None)))
        suspects = {*doubt.found.ranks, *(again.ranks if again else ())}
        alike = again is not None and progress.step == doubt.step

        def judge() -> str:
            moments = [None if each is None else (int(each[0]), bool(each[1])) for each in map(json.loads, firsts)]
            return json.dumps(find_faulty(moments, suspects, alike=alike))

        faulty, since, repeats = json.loads(on_rank0(self._ranks, judge))
        return Verdict(doubt.step, doubt.found, doubt.back, tuple(faulty), since, repeats)


def find_faulty(firsts: Sequence[Moment | None], suspects: Collection[int], *, alike: bool = True) -> Finding:
    """The ranks at fault, by the moment at which each first had other weights than before, None where never.

    Nothing is told where half of the ranks or more differ at once, as by kernels that are not deterministic, but for
    one of two, nor where one does whose copies are not among those that differ. ``alike``: copies differ after the same
    step again.
    """
    earliest = min((moment for moment in firsts if moment is not None), default=None)
    if earliest is None:
        return Finding(repeats=alike)
    odd = tuple(rank for rank, moment in enumerate(firsts) if moment == earliest)
    few = 2 * len(odd) < len(firsts) or (len(odd), len(firsts)) == (1, 2)
    known = few and set(odd) <= set(suspects)
    return Finding(odd if known else (), earliest[0])


def _to_host(notes: Mapping[Moment, Tensor]) -> dict[Moment, int]:
    """The ``notes`` after one copy from the device."""
    return dict(zip(notes, torch.stack([*notes.values()]).tolist(), strict=True)) if notes else {}
