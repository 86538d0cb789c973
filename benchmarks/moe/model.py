"""The layer that all sides compute, its input and weights, and what a side is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_run_testing.build_contexts import current_device

Precision = Literal["fp32", "bf16"]
DTYPES: Mapping[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """``tokens`` meet ``top_k`` of ``experts`` SwiGLU networks without biases, of ``ffn`` features each."""

    experts: int
    top_k: int
    hidden: int
    ffn: int
    tokens: int

    def __str__(self) -> str:
        return (
            f"{self.experts} experts of {self.ffn} features, top {self.top_k}, hidden {self.hidden}, "
            f"{self.tokens} tokens"
        )


#: Of SwiGLU 8/3 of the hidden size are as many parameters as 4 times of another activation.
SMALL = Shape(experts=8, top_k=2, hidden=384, ffn=1024, tokens=1024)
TINY = Shape(experts=4, top_k=2, hidden=32, ffn=48, tokens=24)
SHAPES = {"small": SMALL, "tiny": TINY}


@dataclass(frozen=True)
class Problem:
    """Input x [n, h], the gradient of the output, and the weights, all in one type.

    ``router`` [e, h], ``entry`` [e, 2f, h] holding gate and up, ``exit`` [e, h, f].
    """

    x: Tensor
    grad: Tensor
    router: Tensor
    entry: Tensor
    exit: Tensor

    @classmethod
    def of(cls, shape: Shape, precision: Precision) -> Problem:
        """The same values for every side, rounded to the type, on the device of ``on_device``."""
        generator = torch.Generator().manual_seed(1)

        def normal(*size: int, std: float = 1.0) -> Tensor:
            return (torch.randn(*size, generator=generator) * std).to(current_device(), DTYPES[precision])

        return cls(
            x=normal(shape.tokens, shape.hidden),
            grad=normal(shape.tokens, shape.hidden),
            router=normal(shape.experts, shape.hidden, std=0.02),
            entry=normal(shape.experts, 2 * shape.ffn, shape.hidden, std=0.02),
            exit=normal(shape.experts, shape.hidden, shape.ffn, std=0.02),
        )


class Side(Protocol):
    """One way to compute the layer's output and all gradients."""

    def clear(self) -> None:
        """Forget gradients: no part of the time of a step."""

    def step(self) -> None:
        """Forward and backward."""

    def results(self) -> Mapping[str, Tensor]:
        """Output and gradients after a step: ``y``, ``x`` and the weights by their names, fp32."""
