"""Recomputation: what a function saves for its backward is discarded, and computed again there.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", by segments of a layer as in Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", section 5.

The second run starts when the backward first needs one of the saved tensors, and ends as soon as it has made the last
of them. What only follows that one is not repeated: the message that returns the experts' results is sent once. Ranks
that build the same graph repeat the same collectives at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from megatron_run.contracts import Segment

Environment = dict[str, Tensor]


def run_recomputed(
    segments: Sequence[Segment], environment: Environment, run: Callable[[Segment, Environment], None]
) -> None:
    """Run ``segments`` on ``environment`` by ``run``, which is called again for each in the backward.

    Together they keep what they read from outside, and nothing of each other. ``run`` positions the random streams.
    """
    outputs = tuple(dict.fromkeys(name for segment in segments for name in segment.outputs))

    def compute(inner: Environment) -> None:
        for segment in segments:
            run(segment, inner)

    recompute_names(names_read(segments), outputs, environment, compute)


def recompute_names(
    inputs: Sequence[str], outputs: Sequence[str], environment: Environment, compute: Callable[[Environment], None]
) -> None:
    """Add ``outputs`` to ``environment`` by ``compute``, which gets its ``inputs`` alone, and again in the backward."""

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        inner = dict(zip(inputs, tensors, strict=True))
        compute(inner)
        return tuple(inner[name] for name in outputs)

    found: tuple[Tensor, ...] = checkpoint(
        function, *(environment[name] for name in inputs), use_reentrant=False, preserve_rng_state=False
    )
    environment.update(zip(outputs, found, strict=True))


def recomputed(
    function: Callable[..., Tensor], tensors: Sequence[Tensor | None], streams: Sequence[torch.Generator]
) -> Tensor:
    """``function(*tensors)``, computed again in the backward with the same draws from ``streams``."""
    before: list[Tensor] = []

    def compute(*again: Tensor | None) -> Tensor:
        if not before:
            before.extend(stream.get_state() for stream in streams)
            return function(*again)
        now = [stream.get_state() for stream in streams]
        _set(streams, before)
        try:
            return function(*again)
        finally:  # torch ends a recomputation by an exception
            _set(streams, now)

    result: Tensor = checkpoint(compute, *tensors, use_reentrant=False, preserve_rng_state=False)
    return result


def names_read(segments: Sequence[Segment]) -> tuple[str, ...]:
    """The names that ``segments``, in order, read from outside."""
    made, read = set[str](), dict[str, None]()
    for segment in segments:
        read.update((name, None) for name in segment.inputs if name not in made)
        made.update(segment.outputs)
    return tuple(read)


def _set(streams: Iterable[torch.Generator], states: Iterable[Tensor]) -> None:
    for stream, state in zip(streams, states, strict=True):
        stream.set_state(state)
