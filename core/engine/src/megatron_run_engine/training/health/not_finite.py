"""Where a loss that is not finite comes from. Asked only when there is one: it costs a look at every weight."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.training.build import Assembly
    from megatron_run_engine.training.losses import Reported


class NotFinite(NamedTuple):
    """What was found, in words; empty where all is finite.

    ``loss``: the loss, and the first microbatch and rank that saw it. ``weights``: a parameter that is spoilt, and the
    lowest rank that holds it.
    """

    loss: str
    weights: str


def find_not_finite(assembly: Assembly, reported: Iterable[Reported], ranks: Ranks) -> NotFinite:
    """Look at what each rank ``reported`` in this step, and at its weights. Collective; all get the same answer."""
    notes = ranks.gather(json.dumps(_note(assembly, reported)))
    return NotFinite(*json.loads(ranks.tell(json.dumps(_joined([json.loads(note) for note in notes])))))


def _note(assembly: Assembly, reported: Iterable[Reported]) -> dict[str, Any]:
    seen = ((each, each.total.item()) for each in reported if not each.total.isfinite())
    losses = [(each.microbatch, each.name, str(value)) for each, value in seen]
    return {
        "stage": assembly.context.topology.stage,
        "loss": min(losses, default=None),
        "weights": next(_spoilt(assembly), None),
    }


def _spoilt(assembly: Assembly) -> Iterator[str]:
    """The parameters that are not finite, with a value of each."""
    for described in assembly.infos:
        for parameter, info in described.items():
            finite = torch.isfinite(parameter.detach())
            if not finite.all():
                yield f"{info.name} holds {parameter.detach()[~finite][0].item()}"


def _joined(notes: Sequence[dict[str, Any]]) -> NotFinite:
    """The first microbatch that was not finite, on the lowest rank that saw it."""
    losses = [(note["loss"], rank) for rank, note in enumerate(notes) if note["loss"]]
    weights = [f"{note['weights']} on rank {rank}" for rank, note in enumerate(notes) if note["weights"]]
    loss = ""
    if losses:
        (microbatch, name, value), rank = min(losses, key=lambda each: (each[0][0], each[1]))
        loss = f"the loss {name} is {value}, first seen by rank {rank} (stage {notes[rank]['stage']})"
        loss += f" in microbatch {microbatch}"
    return NotFinite(loss, weights[0] if weights else "")
