"""Hugging Face's Mixtral block, in each of the ways in which it computes experts."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.moe.model import DTYPES, Precision, Problem, Shape

#: What transformers calls its ways; another, ``batched_mm``, copies an expert's matrices for every token.
WAYS = ("eager", "grouped_mm")


def name_of(way: str) -> str:
    """The name of the side in tables."""
    return f"Hugging Face, {way}"


def installed() -> bool:
    """Whether transformers can be imported."""
    return find_spec("transformers") is not None


class Mixtral:
    """Its experts' matrices are stacked, and its router's logits are in the type of its input."""

    def __init__(self, shape: Shape, precision: Precision, way: str) -> None:
        from transformers.models.mixtral.configuration_mixtral import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        config: Any = MixtralConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_local_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
        )
        config._experts_implementation = way
        problem = Problem.of(shape, precision)
        block: Any = MixtralSparseMoeBlock
        self._block: Any = block(config).to(DTYPES[precision])
        self._weights: dict[str, Any] = {
            "router": self._block.gate.weight,
            "entry": self._block.experts.gate_up_proj,
            "exit": self._block.experts.down_proj,
        }
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(getattr(problem, name))
        self._x, self._grad = problem.x[None].requires_grad_(), problem.grad[None]  # [1, n, h]

    def clear(self) -> None:
        """Forget gradients."""
        self._x.grad = None
        self._block.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Forward and backward."""
        self._y: Tensor = self._block(self._x)
        self._y.backward(self._grad)

    def results(self) -> Mapping[str, Tensor]:
        """Output and gradients."""
        assert self._x.grad is not None
        weights = {name: weight.grad.float().flatten() for name, weight in self._weights.items()}
        return {"y": self._y.detach().float()[0], "x": self._x.grad.float()[0], **weights}
