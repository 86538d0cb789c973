"""The part of a whole tensor that each rank holds as a layer's input or output.

Legend: s sequence, b micro batch, n heads, d head size, v vocabulary, p padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import Init, ParallelLayers
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.runtime.comm import Groups
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing.build_contexts import context_at

#: Creates the factory under test; if it needs a base, that is ``DenseLayers(context)``.
CreateLayers = Callable[[BuildContext], ParallelLayers]

INIT = Init("normal", 0.5)
#: A prime, so that every multiple pads it; of it four ranks with 128 rows each hold 128, 128, 51 and none.
VOCAB = 307
LENGTH = 8
HIDDEN = 8


@dataclass(frozen=True)
class Member:
    """Rank ``index`` of the ``size`` ranks that share the layers; each holds ``rows`` of the padded vocabulary.

    ``sequence``: between layers each rank has its own tokens (sequence parallelism).
    """

    index: int = 0
    size: int = 1
    sequence: bool = False
    rows: int = 0

    def __str__(self) -> str:
        if self.size == 1:
            return "one rank"
        return f"rank {self.index} of {self.size}{', sequence split' if self.sequence else ''}"

    def share(self, x: Tensor, dim: int) -> Tensor:
        """This rank's equal part of ``x`` along ``dim``."""
        return x.chunk(self.size, dim)[self.index]


#: Selects the part of a whole tensor that a member holds.
Cut = Callable[[Tensor, Member], Tensor]


def whole(x: Tensor, _: Member) -> Tensor:
    """All of x, on every rank."""
    return x


def tokens(x: Tensor, member: Member) -> Tensor:
    """[s, b, *] -> [s/t, b, *] under sequence parallelism, otherwise all of x."""
    return member.share(x, 0) if member.sequence else x


def heads(x: Tensor, member: Member) -> Tensor:
    """[s, b, n, d] -> [s, b, n/t, d]."""
    return member.share(x, 2)


def features(*parts: int) -> Cut:
    """[*, sum(parts)] -> [*, sum(parts) / t], a share of each part."""

    def cut(x: Tensor, member: Member) -> Tensor:
        return torch.cat([member.share(part, -1) for part in x.split(parts, -1)], -1)

    return cut


def vocabulary(x: Tensor, member: Member) -> Tensor:
    """[*, p] with any padding -> [*, p/t] with the padding of the factory under test, which is zero."""
    real = x[..., :VOCAB]
    return member.share(F.pad(real, (0, member.rows * member.size - VOCAB)), -1)


class _Options(BaseModel):
    """Options of a model, as far as layers need them."""

    num_layers: int = 1
    vocab_size: int = VOCAB


@dataclass(frozen=True)
class Rank:
    """One rank with the factory under test, which ``create`` makes from a context of this ``topology``."""

    create: CreateLayers
    dtype: torch.dtype
    device: torch.device
    topology: Topology
    groups: Groups
    sequence: bool = False

    @classmethod
    def alone(cls, create: CreateLayers, dtype: torch.dtype, device: torch.device) -> Rank:
        """The only rank of a world of one."""
        return cls(create, dtype, device, Topology(Sizes(), 0), Groups())

    def context(self) -> BuildContext:
        """A new context, whose gradient accumulator is empty."""
        train = {"sequence_length": LENGTH}
        return context_at(
            self.topology,
            self.groups,
            _Options(),
            sequence=self.sequence,
            dtype=self.dtype,
            device=self.device,
            train=train,
        )

    def layers(self) -> ParallelLayers:
        """The factory under test, in a new context."""
        return self.create(self.context())

    @cached_property
    def member(self) -> Member:
        """This rank as a member; its rows are those of the factory's embedding, whose padding is its choice."""
        embedding: nn.Module = self.layers().vocab_embedding(VOCAB, HIDDEN, init=INIT)
        rows = len(next(embedding.parameters()))
        return Member(self.topology.tensor_rank, self.topology.sizes.tensor, self.sequence, rows)

    def given(self, x: Tensor | None, cut: Cut) -> Tensor | None:
        """This rank's part of the whole input ``x``, in the dtype under test and requiring a gradient."""
        if x is None:
            return None
        part = cut(x, self.member).to(self.device).clone()
        return part.to(self.dtype).requires_grad_() if part.is_floating_point() else part
