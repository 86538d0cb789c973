"""This project's layer of experts: the five segments of a block, without its norm, losses and residual connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from benchmarks.moe.model import DTYPES, Precision, Problem, Shape
from megatron_run.contracts.schedule import Place
from megatron_run_engine.builtin.model.gpt import ExpertOptions, Gpt, GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_testing.build_contexts import prepare, single_process_context


class OurLayer:
    """Weight gradients are added to fp32 buffers, in bf16 too."""

    def __init__(self, shape: Shape, precision: Precision) -> None:
        problem = Problem.of(shape, precision)
        options = GptOptions(
            num_layers=1,
            hidden_size=shape.hidden,
            num_heads=1,
            vocab_size=128,
            experts=ExpertOptions(count=shape.experts, top_k=shape.top_k, ffn_size=shape.ffn, aux_loss_coeff=0.0),
            activation="swiglu",
            bias=False,
            dropout=0.0,
        )
        context = single_process_context(options, dtype=DTYPES[precision])
        chunk: Any = Gpt(context, options).build_chunk(0, (Place(0, 0, range(1)),), DenseLayers(context), {})
        infos = prepare(context, [chunk])
        block = chunk.layers["0"]
        block.moe.norm = nn.Identity()
        self._weights = {
            "router": block.moe.router.weight,
            "entry": block.moe.experts.input.weight,
            "exit": block.moe.experts.output.weight,
        }
        for name, weight in self._weights.items():
            weight.data.copy_(getattr(problem, name).view_as(weight))
        self._moe, self._parameters = block.moe, list(infos)
        self._x, self._grad = problem.x[:, None].requires_grad_(), problem.grad[:, None]  # [n, 1, h]

    def clear(self) -> None:
        """Forget gradients."""
        self._x.grad = None
        for parameter in self._parameters:
            main_grad(parameter).zero_()

    def step(self) -> None:
        """Forward, as the segments of a block call it, and backward."""
        moe = self._moe
        tokens, weights, chosen, load = moe.route(self._x)
        order, place, counts, _ = moe.place(weights, chosen, load)
        rows, routed = moe.dispatcher.dispatch(tokens, weights, order, place, counts)
        returned = moe.compute(rows, weights, routed)
        self._y: Tensor = moe.combine(1, returned, weights, order, place)
        self._y.backward(self._grad)

    def results(self) -> Mapping[str, Tensor]:
        """Output and gradients."""
        assert self._x.grad is not None
        weights = {name: main_grad(weight).flatten() for name, weight in self._weights.items()}
        return {"y": self._y.detach().float()[:, 0], "x": self._x.grad.float()[:, 0], **weights}
