"""One stage of a gpt in this process, whose steps run eagerly or through captured graphs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_run.contracts import CaptureSize, GraphCapture, Microbatch
from megatron_run.contracts.schedule import Action, LayoutSpec, ScheduleSpec, looped_layout
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.capture import backend_for
from megatron_run_graph_capture_compile.capture import CompileCapture, CompileOptions
from megatron_run_graph_capture_compile.compiler import find_compiler
from megatron_run_graph_capture_partial.capture import PartialCapture, PartialOptions
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_testing.build_contexts import prepare, single_process_context


@dataclass(frozen=True)
class Size:
    """``layers`` of ``hidden`` features and heads of 16, on one sequence of ``sequence`` tokens."""

    hidden: int
    sequence: int = 64
    layers: int = 2


class Stage:
    """The middle of a pipeline: layers without embedding and head, given x and the gradient of what it makes of it."""

    def __init__(self, size: Size) -> None:
        model = GptOptions(
            num_layers=size.layers, hidden_size=size.hidden, num_heads=size.hidden // 16, vocab_size=64, dropout=0.0
        )
        train = {"sequence_length": size.sequence, "micro_batch_size": 1, "global_batch_size": 1}
        self.context = single_process_context(model, dtype=torch.float32, train=train)
        layout = looped_layout(LayoutSpec(3, 1, size.layers, (0, size.layers, 0)))
        self.chunk = Gpt(self.context, model).build_chunk(1, layout, DenseLayers(self.context), {})
        prepare(self.context, [self.chunk])
        self.x = torch.randn(size.sequence, 1, size.hidden)
        self.gradient = torch.randn_like(self.x)

    def run(self, actions: list[Action], step: int) -> Tensor:
        """One step of ``actions``; the last gradient of x."""
        given: dict[int, Tensor] = {}
        made: dict[int, Tensor] = {}
        for op, microbatch, _ in actions:
            if op == "F":
                given[microbatch] = self.x.detach().requires_grad_()
                out = self.chunk(given[microbatch], Microbatch(microbatch, step, microbatch, {}))
                assert out.x is not None
                made[microbatch] = out.x
            else:
                made.pop(microbatch).backward(self.gradient)
                last = given.pop(microbatch).grad
        assert last is not None
        return last

    def capture(self, actions: list[Action], reuse: str = "per_microbatch") -> CaptureSize:
        """Replay attn and mlp from now on; an eager step comes first."""
        options = PartialOptions.model_validate({"scope": ("attn", "mlp"), "graph_reuse": reuse})
        return self._start(actions, PartialCapture(self.context, options, lambda: backend_for(self.context)))

    def compile(self, actions: list[Action]) -> CaptureSize:
        """Run attn and mlp compiled by inductor from now on; an eager step comes first."""
        options = CompileOptions(scope=("attn", "mlp"))
        compiler = partial(find_compiler, options.backend, options.mode)
        return self._start(actions, CompileCapture(self.context, options, compiler))

    def _start(self, actions: list[Action], capture: GraphCapture) -> CaptureSize:
        regions = capture.regions([self.chunk.segments()])
        self.context.segments.watch(regions)
        self.run(actions, 0)
        size = capture.capture(regions, actions, self.context.segments.examples)
        self.context.segments.replay_with(capture)
        return size


def one_f_one_b(in_flight: int, microbatches: int) -> list[Action]:
    """1F1B on the first of ``in_flight`` stages, which holds as many microbatches."""
    spec = ScheduleSpec(looped_layout(LayoutSpec(in_flight, 1, in_flight)), in_flight, 1, microbatches)
    return OneForwardOneBackward().actions(spec)[0]
