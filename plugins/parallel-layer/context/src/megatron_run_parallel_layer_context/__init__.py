"""Parallel layers ``context``: attention over samples whose tokens are split over the ranks of ``parallel.context``.

Every other layer computes each token by itself, so only the core of the attention changes: it is given the queries,
keys and values of this rank's pieces (:class:`megatron_run.contracts.Pieces`) and attends to the tokens of all ranks.

- ``ring``: keys and values travel from rank to rank (Liu et al. 2023, "Ring Attention"), their gradients behind them.
- ``all_gather``: every rank gathers all keys and values (Grattafiori et al. 2024, "The Llama 3 Herd of Models", 3.3.2).
- ``ulysses``: ranks exchange tokens for heads (Jacobs et al. 2023, "DeepSpeed Ulysses"), so that the core of the layers
  below sees whole samples, and a part of the heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import ParallelLayers, Pieces, PluginInfo, StackedLayers
from megatron_run.contracts.pieces import SHORT
from megatron_run.errors import InputError
from megatron_run.errors.wording import nearest_divisors
from megatron_run.hookspecs import hookimpl
from megatron_run_parallel_layer_context.piecewise import PiecewiseAttention
from megatron_run_parallel_layer_context.ulysses import UlyssesAttention

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from megatron_run.contracts import AttentionShape
    from megatron_run.contracts.schema import Config
    from megatron_run_engine.runtime import BuildContext


class Options(BaseModel):
    """The options in section ``parallel-layer``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["ring", "all_gather", "ulysses"] = Field(
        "ring", description="how the tokens of a sample meet: keys travel, keys are gathered, or tokens become heads"
    )


def check_config(config: Config, _options: Options) -> Iterator[str]:
    """Notices about ranks that split nothing, and about samples too short to be split."""
    ranks, length = config.parallel.context, config.train.sequence_length
    if ranks == 1:
        yield "parallel-layer=context changes nothing: with parallel.context=1 a rank holds whole samples"
    elif Pieces(0, ranks).short(length):
        yield (
            f"parallel.context={ranks} splits samples of {length} tokens into pieces of {length // (2 * ranks)}, below "
            f"{SHORT}: copies of the model (parallel.data) exchange less"
        )


class ContextLayers(StackedLayers):
    """The layers of ``base``, whose attention sees all pieces of a sample."""

    def __init__(self, context: BuildContext, base: ParallelLayers, options: Options) -> None:
        super().__init__(base)
        self._pieces, self._method = context.pieces, options.method
        self._pieces.part(context.train.sequence_length)  # says what does not divide
        self._peers = context.groups.parallel_group(context.topology, "context")
        self._stream, self._tensor = context.rng.sharded, context.topology.sizes.tensor

    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        """Attention over the pieces of all ranks; that of ``base`` where one rank holds the samples."""
        whole = self.base.core_attention(shape, dropout)  # says which heads do not split over tensor-parallel ranks
        if self._pieces.ranks == 1:
            return whole
        if self._method != "ulysses":
            return PiecewiseAttention(shape, dropout, self._pieces, self._peers, self._method, self._stream)
        ranks, few = self._pieces.ranks, shape.kv_heads // self._tensor  # query heads are as many, or a multiple
        if few % ranks:
            of = f" of each of parallel.tensor={self._tensor} ranks" if self._tensor > 1 else ""
            raise InputError(
                f"method=ulysses gives each rank whole heads: {few} key-value heads{of} do not split over "
                f"parallel.context={ranks}",
                fix=f"choose parallel-layer.method=ring, or set parallel.context to {nearest_divisors(few, ranks)}",
            )
        part = replace(shape, heads=shape.heads // ranks, kv_heads=shape.kv_heads // ranks)
        return UlyssesAttention(self.base.core_attention(part, dropout), self._pieces, self._peers)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Serves context parallelism; suggests two ranks."""
    return PluginInfo(
        "parallel-layer",
        "context",
        options=Options,
        provides=frozenset({"parallel.context"}),
        suggests={"parallel.context": 2},
        check_config=check_config,
    )


@hookimpl
def megatron_run_create_parallel_layer(context: BuildContext, options: Options, base: ParallelLayers) -> ParallelLayers:
    """Make the factory for the context-parallel ranks of ``context``, upon ``base``."""
    return ContextLayers(context, base, options)
