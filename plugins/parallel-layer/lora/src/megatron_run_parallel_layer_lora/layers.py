"""Linear layers with low-rank adapters, for every split that the factory below knows.

An adapter of a column-parallel W multiplies by A before the region, where x is [s, b, i] or, under sequence
parallelism, [s/t, b, i]; the product has r features, and only they enter the region a second time. B is a
column-parallel layer of the factory below, split as W is. An adapter of a row-parallel W is the mirror image: A is a
row-parallel layer, whose r features leave the region, and B multiplies outside of it. What lies outside is replicated:
under sequence parallelism its gradient is a term of a sum over the tensor ranks, as that of a norm.

Legend: s sequence, b micro batch, i inputs, o outputs, r rank of an adapter, t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_run.contracts import Init, LinearPart, LinearSpec
from megatron_run_engine.nn import ReplicatedLinear

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch.nn import Parameter

    from megatron_run.contracts import ParallelLayers
    from megatron_run_engine.runtime import BuildContext

#: The names of A and B: ``X.lora_a.weight`` [r, i] and ``X.lora_b.weight`` [o, r] adapt ``X.weight`` [o, i].
DOWN, UP = "lora_a", "lora_b"
_ZEROS = Init("zeros")


@dataclass(frozen=True)
class LowRank:
    """The common traits of all adapters. ``scale`` is alpha / ``rank``, ``dropout`` is that of their input."""

    rank: int
    scale: float
    dropout: float


def down_init(inputs: int) -> Init:
    """U(-1/sqrt(i), 1/sqrt(i)), Kaiming's for a slope of sqrt(5): what PEFT and ``nn.Linear`` start with."""
    return Init("uniform", (3 * inputs) ** -0.5)


class ColumnAdapter(nn.Module):
    """``B A dropout(x)`` for one part of a column-parallel layer."""

    def __init__(
        self, context: BuildContext, below: ParallelLayers, inputs: int, part: LinearPart, how: LowRank
    ) -> None:
        super().__init__()
        self.dropout = below.dropout(how.dropout)
        self.lora_a = ReplicatedLinear(context, inputs, how.rank, down_init(inputs))
        up = LinearPart(UP, part.features, part.key)
        self.base = below.column_linear(LinearSpec(how.rank, (up,), _ZEROS, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i] or [s/t, b, i] -> [s, b, o/t]."""
        y: Tensor = self.base(self.lora_a(self.dropout(x)))
        return y


class LoraColumn(nn.Module):
    """A column-parallel layer ``base`` with an adapter for each of its ``parts``, a child of the part's name.

    The norm is applied here, once for both, and so not fused with the product.
    """

    def __init__(
        self,
        context: BuildContext,
        below: ParallelLayers,
        base: nn.Module,
        spec: LinearSpec,
        norm: nn.Module | None,
        how: LowRank,
    ) -> None:
        super().__init__()
        self.base, self.norm, self._parts, self._scale = base, norm, spec.parts, how.scale
        for part in spec.parts:
            self.add_module(part.name, ColumnAdapter(context, below, spec.inputs, part, how))

    def names(self, path: str) -> list[str]:
        """The names of the matrices that can be adapted, for a layer at ``path``."""
        return [f"{path}.{part.name}" for part in self._parts]

    def keep(self, path: str, adapted: Collection[str]) -> Iterator[Parameter]:
        """Drop the adapters of all matrices but ``adapted``; yield the parameters of those that stay."""
        for part, name in zip(self._parts, self.names(path), strict=True):
            if name in adapted:
                yield from self.get_submodule(part.name).parameters()
            else:
                delattr(self, part.name)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i] or [s/t, b, i] -> [s, b, o/t], part by part."""
        x = x if self.norm is None else self.norm(x)
        y: Tensor = self.base(x)
        split = sum(part.features for part in self._parts) // y.shape[-1]
        pieces = list(y.split([part.features // split for part in self._parts], -1))
        for index, part in enumerate(self._parts):
            if part.name in self._modules:
                pieces[index] = pieces[index] + self._scale * self.get_submodule(part.name)(x)
        return torch.cat(pieces, -1)


class LoraRow(nn.Module):
    """A row-parallel layer ``base`` with an adapter."""

    def __init__(
        self, context: BuildContext, below: ParallelLayers, base: nn.Module, spec: LinearSpec, how: LowRank
    ) -> None:
        super().__init__()
        self.base, self._scale = base, how.scale
        self.dropout = nn.Dropout(how.dropout)  # inside the region ranks hold different features: their masks differ
        down = LinearSpec(spec.inputs, how.rank, down_init(spec.inputs), bias=False)
        self.lora_a: nn.Module | None = below.row_linear(down)
        self.lora_b: nn.Module | None = ReplicatedLinear(context, how.rank, spec.features, _ZEROS)

    def names(self, path: str) -> list[str]:
        """The name of the matrix that can be adapted, for a layer at ``path``."""
        return [path]

    def keep(self, path: str, adapted: Collection[str]) -> Iterator[Parameter]:
        """Drop the adapter unless ``path`` is among ``adapted``; yield its parameters if it stays."""
        if path not in adapted:
            self.lora_a = self.lora_b = None
        for layer in filter(None, (self.lora_a, self.lora_b)):
            yield from layer.parameters()

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i/t] -> [s, b, o] or [s/t, b, o]."""
        y: Tensor = self.base(x)
        if self.lora_a is None or self.lora_b is None:
            return y
        added: Tensor = self.lora_b(self.lora_a(self.dropout(x)))
        return y + self._scale * added
