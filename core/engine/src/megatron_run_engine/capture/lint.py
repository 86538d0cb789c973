"""The rules of capture, tried on a region segment by segment before anything is recorded.

It also is the warm-up: what initialises itself at its first call does so here. Torch wants warm-ups on a side stream,
because the nodes that accumulate into ``.grad`` remember the stream on which they were made and would draw it into the
capture. Here the current stream is right: nothing is accumulated (:func:`run_backward`), no node outlives
:func:`lint`, and so those of the capture are made anew, on its stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_run.errors import GraphCaptureError
from megatron_run_engine.capture.rules import Rules, blamed

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import Region, Segment
    from megatron_run_engine.runtime.gradients import GradientAccumulator


def lint(
    region: Region,
    examples: Sequence[Tensor],
    device: torch.device,
    gradients: GradientAccumulator,
    generators: Sequence[torch.Generator],
) -> tuple[Parameter, ...]:
    """Run each segment forward and backward on zeros like ``examples`` and see that it keeps the rules.

    Returns the parameters whose layers hand their gradients to the ledger themselves, which a recorded backward then
    does without its word. Leaves parameters, gradients and the random streams of ``generators`` as they were. Raises
    :class:`GraphCaptureError`, which names the segment and the operation.
    """
    environment = dict(zip(region.inputs, (zeros_like(example, device) for example in examples), strict=True))
    with kept_streams(generators), gradients.recording() as handed_over:
        for segment in region.segments:
            inputs = [_leaf(environment[name]) for name in segment.inputs]
            outputs = _try(segment, inputs, generators, alone=len(region.segments) == 1)
            environment.update(zip(segment.outputs, outputs, strict=True))
    return tuple(handed_over)


def zeros_like(example: Tensor, device: torch.device) -> Tensor:
    """Zeros with the shape, strides, type and ``requires_grad`` of ``example``."""
    zeros = torch.empty_strided(example.size(), example.stride(), dtype=example.dtype, device=device).zero_()
    return zeros.requires_grad_(example.requires_grad)


@contextmanager
def kept_streams(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Within: random numbers may be drawn; afterwards each stream is where it was."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of ``inputs``, None where there is none; nothing is accumulated.

    As ``torch.autograd.grad``, one level below it: that one is itself overridable, so that while it runs, the mode
    that refuses host reads is switched off.
    """
    if not roots or not inputs:
        return [None] * len(inputs)
    found = torch.autograd.graph._engine_run_backward(
        tuple(roots),
        tuple(gradients),
        False,  # keep_graph
        False,  # create_graph
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return list(found)


def _try(
    segment: Segment, inputs: Sequence[Tensor], generators: Sequence[torch.Generator], *, alone: bool
) -> tuple[Tensor, ...]:
    who = f"segment {segment.name} of layer {segment.layer}"
    before = [generator.get_state() for generator in generators]
    with torch.enable_grad(), blamed(who, "forward"), Rules(generators):
        result = segment.fn(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    _check_outputs(segment, outputs)
    drew = any(not torch.equal(state, g.get_state()) for state, g in zip(before, generators, strict=True))
    if drew and not segment.draws and not alone:
        raise GraphCaptureError(
            f"{who} draws random numbers and does not say so",
            why="the random streams are positioned once for all segments that are captured together",
            fix="set Segment.draws where the model makes it",
        )
    roots = [output for output in outputs if output.requires_grad]
    wanted = [x for x in (*inputs, *segment.params) if x.requires_grad]
    with blamed(who, "backward"), Rules(generators):
        run_backward(roots, [torch.zeros_like(root) for root in roots], wanted)
    return outputs


def _check_outputs(segment: Segment, outputs: Sequence[object]) -> None:
    others = [type(output).__name__ for output in outputs if not isinstance(output, Tensor)]
    if others or len(outputs) != len(segment.outputs):
        gives = f"it returns a value of type {others[0]}" if others else f"it returns {len(outputs)} tensors"
        raise GraphCaptureError(
            f"segment {segment.name} of layer {segment.layer} cannot be captured",
            why=f"{gives}, and declares {len(segment.outputs)}: {', '.join(segment.outputs)}; only tensors can cross",
            fix="leave it out of graph-capture.scope",
        )


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)
