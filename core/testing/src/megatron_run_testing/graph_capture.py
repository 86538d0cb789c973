"""The conformance suite of kind ``graph-capture``: a captured layer computes the same as an eager one.

Bit for bit, or where :attr:`GraphCapture.exact` is false, but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_run.contracts import Chunk, GraphCapture, Microbatch, Region
from megatron_run.contracts.schedule import Action, LayoutSpec, looped_layout
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.host.process import deterministic_kernels
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_testing import Check, CheckFailed
from megatron_run_testing.build_contexts import (
    current_device,
    example_microbatch,
    logical_gradients,
    prepare,
    single_process_context,
)

CaptureFactory = Callable[[BuildContext], GraphCapture]
_OPTIONS = GptOptions(num_layers=2, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.1)
#: (microbatch, chunk)
_Pass = tuple[int, int]
_MICROBATCHES = 3
#: One microbatch after the other, in one chunk.
_SEQUENTIAL = tuple(Action(op, m, 0) for m in range(_MICROBATCHES) for op in ("F", "B"))
#: As many in flight as there are in the first of two chunks, and backwards between forwards in the second.
_IN_FLIGHT = tuple(
    map(Action.parse, ("F0.0", "F1.0", "F0.1", "F1.1", "B0.1", "F2.0", "B0.0", "F2.1", "B1.1", "B2.1", "B1.0", "B2.0"))
)
#: What a capture that is not exact may differ by: relative to a loss, and to the largest gradient of all.
_ROUNDING = 1e-5
#: Standard deviation of what each step adds to parameters.
_UPDATE = 0.05


def graph_capture_checks(
    factory: CaptureFactory, why_not: Callable[[], str] = str, *, device: str | None = None
) -> tuple[Check, ...]:
    """The checks of a graph capture on ``device``, by default that of :func:`on_device`.

    ``factory`` creates a new one from a context.

    ``why_not`` returns the reason why nothing can be captured there, empty if it can; then there is nothing to try.
    """
    place = str(current_device()) if device is None else device

    def tried(check: Callable[[_Bench, _Bench], None], actions: Sequence[Action]) -> str:
        if reason := why_not():
            return reason
        with deterministic_kernels(place):
            eager, captured = (_Bench(factory, place, actions) for _ in range(2))
            if not captured.watched:
                return "it captures no region"
            check(eager, captured)
        return ""

    return (
        Check(
            "regions lie within a layer and may be captured",
            lambda: _check_regions(factory, place),
        ),
        Check("captured steps equal eager ones in losses and gradients", lambda: tried(_check_equal, _SEQUENTIAL)),
        Check(
            "microbatches in flight in two chunks keep apart what they captured",
            lambda: tried(_check_equal, _IN_FLIGHT),
        ),
        Check("invalidate returns to eager steps", lambda: tried(_check_invalidate, _SEQUENTIAL)),
    )


class _Bench:
    """A gpt of two layers that runs ``actions``, eagerly and then from a capture.

    After each step its parameters change in place, as those of an optimizer do.
    """

    def __init__(self, factory: CaptureFactory, device: str, actions: Sequence[Action]) -> None:
        self.actions = actions
        self.context = single_process_context(_OPTIONS, dtype=torch.float32, device=device)
        self.capture = factory(self.context)
        model, layers, shared = Gpt(self.context, _OPTIONS), DenseLayers(self.context), dict[str, Parameter]()
        layout = looped_layout(LayoutSpec(stages=1, chunks=1 + max(action.chunk for action in actions), layers=2))
        self.chunks: list[Chunk] = [
            model.build_chunk(position, layout, layers, shared) for position in range(len(layout))
        ]
        self.infos = prepare(self.context, self.chunks)
        self.watched = self.regions()
        self.context.segments.watch(self.watched)

    def regions(self) -> tuple[Region, ...]:
        return tuple(self.capture.regions([chunk.segments() for chunk in self.chunks]))

    def start_capture(self) -> None:
        """Capture, after an eager step has recorded the inputs of each region."""
        made = self.capture.capture(self.watched, self.actions, self.context.segments.examples)
        planned = self.capture.plan(self.watched, self.actions)
        if (made.regions, made.graphs, made.slots) != (planned.regions, planned.graphs, planned.slots):
            raise CheckFailed(f"captured were {made}, planned {planned}")
        if mismatch := self.capture.mismatch(self.actions):
            raise CheckFailed(f"what was just captured does not fit its own actions: {mismatch}")
        self.context.segments.replay_with(self.capture)

    def step(self, step: int) -> tuple[list[float], dict[str, Tensor]]:
        """One step of all microbatches: its losses and gradients."""
        for parameter in self.infos:
            main_grad(parameter).zero_()
        losses, inputs, outputs = dict[int, Tensor](), dict[_Pass, Tensor](), dict[_Pass, Tensor]()
        for op, index, chunk in self.actions:
            here, after = (index, chunk), (index, chunk + 1)
            if op == "F":
                out = self.chunks[chunk](inputs.get(here), self._microbatch(step, index))
                if out.x is None:
                    losses[index] = outputs[here] = out.losses["lm"][0]
                else:
                    outputs[here], inputs[after] = out.x, out.x.detach().requires_grad_()
            else:
                given = inputs.pop(after, None)
                torch.autograd.backward(outputs.pop(here), None if given is None else given.grad)
        gradients = logical_gradients(self.infos)
        self._update(step)
        return [cast("float", losses[index].item()) for index in sorted(losses)], gradients

    def _microbatch(self, step: int, index: int) -> Microbatch:
        example = example_microbatch(32, step=step, seed=1000 * step + index)
        fields = {name: field.to(self.context.device) for name, field in example.fields.items()}
        return Microbatch(index, step, index, fields)

    def _update(self, step: int) -> None:
        """Change every parameter in place: by noise, so that both benches go on from equal ones."""
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in self.infos:
                parameter.add_(_UPDATE * torch.randn(parameter.shape, generator=generator).to(parameter))


def _check_regions(factory: CaptureFactory, device: str) -> None:
    for region in _Bench(factory, device, _SEQUENTIAL).regions():
        names = "+".join(segment.name for segment in region.segments)
        if not region.segments:
            raise CheckFailed("a region holds no segment")
        if len({segment.layer for segment in region.segments}) > 1:
            raise CheckFailed(f"region {names} crosses a layer")
        eager = [segment for segment in region.segments if segment.why_eager]
        if sum(segment.draws for segment in region.segments) > 1:
            raise CheckFailed(f"region {names} holds several segments that draw random numbers")
        if eager:
            raise CheckFailed(f"region {names} holds {eager[0].name}, which is eager: {eager[0].why_eager}")


def _check_equal(eager: _Bench, captured: _Bench) -> None:
    for step in range(1, 5):
        if step == 2:
            captured.start_capture()
        _expect_equal(step, eager.step(step), captured.step(step), exact=captured.capture.exact)


def _check_invalidate(eager: _Bench, captured: _Bench) -> None:
    _expect_equal(1, eager.step(1), captured.step(1))
    captured.start_capture()
    captured.capture.invalidate("the conformance suite asks")
    captured.context.segments.replay_with(None)
    _expect_equal(2, eager.step(2), captured.step(2))


def _expect_equal(
    step: int,
    eager: tuple[list[float], dict[str, Tensor]],
    captured: tuple[list[float], dict[str, Tensor]],
    *,
    exact: bool = True,
) -> None:
    """Equal bits, or without ``exact`` equal values but for the rounding of fp32."""
    bound = 0.0 if exact else _ROUNDING
    if any(abs(loss - wanted) > bound * abs(wanted) for loss, wanted in zip(captured[0], eager[0], strict=True)):
        raise CheckFailed(f"step {step}: losses are {captured[0]} captured and {eager[0]} eager")
    largest = max(gradient.abs().max().item() for gradient in eager[1].values())
    for name, gradient in eager[1].items():
        if exact and not torch.equal(gradient, captured[1][name]):
            raise CheckFailed(f"step {step}: the gradient of {name} differs from eager")
        if not exact and not torch.allclose(gradient, captured[1][name], rtol=10 * bound, atol=bound * largest):
            raise CheckFailed(f"step {step}: the gradient of {name} differs from eager by more than rounding")
