"""One process runs every stage of a small pipeline in the planned order, eagerly or through captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_run.contracts import CaptureSize, Chunk, Microbatch, ParallelLayers, Region, Schedule, Segment
from megatron_run.contracts.schedule import Action, LayoutSpec, ScheduleSpec, looped_layout
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.pipeline.plan import Plan, positions
from megatron_run.pipeline.verify import verify
from megatron_run_engine.builtin.model.gpt import ExpertOptions, Gpt, GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.capture import RegionCapture, backend_for
from megatron_run_engine.nn.parallel import LayerSplit, ReplicatedDropout
from megatron_run_engine.runtime.comm import Groups, ParallelGroup
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_graph_capture_partial.capture import PartialCapture, PartialOptions
from megatron_run_parallel_layer_tensor import TensorLayers
from megatron_run_testing.build_contexts import context_at, example_microbatch, prepare, single_process_context

SMALL = GptOptions(num_layers=2, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.1)
EXPERTS = SMALL.model_copy(update={"experts": ExpertOptions(count=4, z_loss_coeff=1e-3)})
LR = 0.05


def partial_capture(context: BuildContext, **options: Any) -> PartialCapture:
    """The plugin's object; ``options`` are its options."""
    chosen = PartialOptions.model_validate({"scope": ("attn", "mlp"), **options})
    return PartialCapture(context, chosen, lambda: backend_for(context))


class SharedDropout(TensorLayers):
    """Tensor-parallel layers whose dropout draws, as on several ranks, from the stream that ranks share."""

    def dropout(self, p: float) -> nn.Module:
        """Of masks that are equal on all tensor-parallel ranks."""
        return ReplicatedDropout(p, self.context.rng)


def whole_tensor_layers(context: BuildContext) -> ParallelLayers:
    """The tensor-parallel layers of one rank, with the dropout of several."""
    return SharedDropout(context, LayerSplit(ParallelGroup()))


@dataclass
class Stage:
    """The chunks of one stage, and what captures them."""

    context: BuildContext
    chunks: list[Chunk]
    parameters: list[Parameter]
    capture: RegionCapture
    regions: Sequence[Region]
    size: CaptureSize | None = None


@dataclass
class Done:
    """What a step left behind: losses, weights by stage, and the state of the default generator."""

    losses: list[Tensor]
    weights: list[Tensor] = field(repr=False)
    stream: Tensor = field(repr=False)

    def equals(self, other: Done) -> bool:
        """Bit for bit."""
        return self.losses_and_weights_equal(other) and torch.equal(self.stream, other.stream)

    def losses_and_weights_equal(self, other: Done) -> bool:
        """Bit for bit, wherever the random stream stands: what is recomputed moves it again."""
        return all(map(torch.equal, self.losses, other.losses)) and all(map(torch.equal, self.weights, other.weights))


class Pipeline:
    """A gpt over ``stages`` x ``chunks`` places, one layer each unless ``model`` has more; SGD updates it.

    ``layers`` makes its layers; ``train`` overrides keys of that section. ``options`` are those of the capture, or
    ``make`` makes it. Microbatches have two samples of 16 tokens.
    """

    def __init__(
        self,
        schedule: Schedule,
        microbatches: int,
        *,
        stages: int = 1,
        chunks: int = 1,
        model: GptOptions = SMALL,
        dtype: torch.dtype = torch.float32,
        layers: Callable[[BuildContext], ParallelLayers] = DenseLayers,
        make: Callable[[BuildContext], RegionCapture] | None = None,
        train: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._layers, self._make = layers, make or (lambda context: partial_capture(context, **options))
        layout = looped_layout(LayoutSpec(stages, chunks, model.num_layers))
        spec = ScheduleSpec(layout, stages, chunks, microbatches)
        self.plan: Plan = verify(spec, schedule.actions(spec))
        self.microbatches, self.vocab = microbatches, model.vocab_size or 0
        self.places, self.last = positions(layout), len(layout) - 1
        self._train = train
        self.stages = [self._stage(stage, layout, model, dtype, stages) for stage in range(stages)]

    def _stage(self, stage: int, layout: Any, model: GptOptions, dtype: torch.dtype, stages: int) -> Stage:
        topology = Topology(Sizes(pipeline=stages), stage)
        context = context_at(topology, Groups(), model, dtype=dtype, train=self._train)
        gpt, layers, shared = Gpt(context, model), self._layers(context), dict[str, Parameter]()
        mine = sorted((place.chunk, position) for position, place in enumerate(layout) if place.stage == stage)
        chunks = [gpt.build_chunk(position, layout, layers, shared) for _, position in mine]
        described = prepare(context, chunks)
        for chunk in chunks:
            layers.finish(cast("nn.Module", chunk))  # afterwards, so that what it freezes has a gradient too: zeros
        capture = self._make(context)
        regions = capture.regions([chunk.segments() for chunk in chunks])
        context.segments.watch(regions)
        return Stage(context, chunks, list(described), capture, regions)

    def actions(self, stage: int = 0) -> tuple[Action, ...]:
        """The actions of ``stage``."""
        return self.plan.lists[stage]

    def start_capture(self, *only: int) -> list[CaptureSize]:
        """Capture these stages, every one if none is named, once a step has run; their sizes."""
        for index in only or range(len(self.stages)):
            stage = self.stages[index]
            stage.size = stage.capture.capture(stage.regions, self.actions(index), stage.context.segments.examples)
            stage.context.segments.replay_with(stage.capture)
        return [stage.size for stage in self.stages if stage.size is not None]

    def step(self, number: int) -> Done:
        """One step of all stages in the plan's order, then the update."""
        self._crossing: dict[tuple[str, int, int], Tensor] = {}
        self._inputs: dict[tuple[int, int], Tensor | None] = {}
        self._outputs: dict[tuple[int, int], tuple[Tensor | None, Tensor | None]] = {}
        self._losses: dict[tuple[int, str], Tensor] = {}
        for stage in self.stages:
            for parameter in stage.parameters:
                main_grad(parameter).zero_()
        for stage_number, index in self.plan.order:
            self._run(number, stage_number, self.plan.lists[stage_number][index])
        weights = []
        for stage in self.stages:
            for parameter in stage.parameters:
                with torch.no_grad():
                    parameter.sub_(LR * main_grad(parameter).to(parameter.dtype))
                weights.append(parameter.detach().clone())
        return Done([self._losses[key] for key in sorted(self._losses)], weights, torch.get_rng_state())

    def _run(self, number: int, stage: int, action: Action) -> None:
        position, key = self.places[stage, action.chunk], (action.microbatch, self.places[stage, action.chunk])
        gradients = self.stages[stage].context.gradients
        if action.op == "F":
            self._forward(number, stage, action, position)
        elif action.op == "B":
            self._backward(key)
        elif action.op == "I":
            with gradients.deferring((action.microbatch, action.chunk)):
                self._backward(key)
        elif action.op == "W":
            gradients.run_deferred((action.microbatch, action.chunk))

    def _forward(self, number: int, stage: int, action: Action, position: int) -> None:
        m = action.microbatch
        fields = example_microbatch(self.vocab, step=number, seed=1000 * number + m).fields
        x = self._crossing.pop(("x", m, position), None)
        if x is not None:
            x.requires_grad_()
        out = self.stages[stage].chunks[action.chunk](x, Microbatch(m, number, m, fields))
        self._inputs[m, position] = x
        if out.x is not None:
            self._crossing["x", m, position + 1] = out.x.detach()
        for name, (total, _) in out.losses.items():
            self._losses[m, f"{name} at {position}"] = total.detach().clone()
        losses = [total / weight.clamp(min=1) for total, weight in out.losses.values() if total.requires_grad]
        self._outputs[m, position] = (out.x, torch.stack(losses).sum() if losses else None)

    def _backward(self, key: tuple[int, int]) -> None:
        m, position = key
        x, loss = self._outputs.pop(key)
        roots = [root for root in (loss, x) if root is not None]
        gradients = [self._crossing.pop(("g", m, position)) if root is x else None for root in roots]
        torch.autograd.backward(roots, gradients)
        given = self._inputs.pop(key)
        if given is not None:
            assert given.grad is not None
            self._crossing["g", m, position - 1] = given.grad


def one_region(
    fn: Callable[..., Any],
    inputs: Sequence[Tensor],
    *,
    params: Sequence[Any] = (),
    name: str = "attn",
    **options: Any,
) -> tuple[PartialCapture, Region, BuildContext]:
    """A capture of a layer that is ``fn`` alone, recorded for one microbatch on tensors like ``inputs``."""
    context = single_process_context(dtype=torch.float32)
    for parameter in params:
        context.gradients.adopt(parameter, "weight")
        parameter.main_grad = torch.zeros_like(parameter)
    names = tuple(f"in{index}" for index in range(len(inputs)))
    capture = partial_capture(context, scope=(name,), **options)
    (region,) = capture.regions([[Segment(name, 3, 0, fn, names, ("out",), tuple(params))]])
    examples = {region: tuple(torch.empty_like(x, device="meta", requires_grad=x.requires_grad) for x in inputs)}
    capture.capture([region], [Action("F", 0, 0), Action("B", 0, 0)], examples)
    return capture, region, context
