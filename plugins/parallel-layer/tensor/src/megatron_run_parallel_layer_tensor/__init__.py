"""Parallel layers ``tensor``: each layer split over the ranks of ``parallel.tensor``, as in Megatron-LM.

A transformer layer needs two all-reduces in its forward and two in its backward (Shoeybi et al. 2019, figure 4), or,
with ``parallel.sequence``, as many pairs of all-gather and reduce-scatter, while norms, dropout and the residual stream
hold s/t of the sequence (Korthikanti et al. 2022).

Reading order: ``regions`` (f, g and their conjugates), ``linear``, ``vocabulary``, ``dropout``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from megatron_run.contracts import ParallelLayers, PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run.nn import CoreAttention, CrossEntropy, LayerNorm, RmsNorm
from megatron_run_parallel_layer_tensor.dropout import ReplicatedDropout
from megatron_run_parallel_layer_tensor.linear import ColumnLinear, RowLinear
from megatron_run_parallel_layer_tensor.split import Split
from megatron_run_parallel_layer_tensor.vocabulary import OutputLayer, VocabEmbedding

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import AttentionShape, BuildContext, Init, LinearPart


class Options(BaseModel):
    """What a user may set in the section ``parallel-layer``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    overlap: bool = Field(True, description="communicate during the weight gradients of a backward")


class TensorLayers(ParallelLayers):
    """Makes layers that the ranks of one axis share."""

    def __init__(self, context: BuildContext, split: Split) -> None:
        self._context, self._split = context, split
        if split.sequence:
            split.part(context.train.sequence_length, "tokens of train.sequence_length")

    def column_linear(
        self,
        inputs: int,
        parts: tuple[LinearPart, ...],
        *,
        bias: bool,
        init: Init,
        norm: nn.Module | None = None,
    ) -> nn.Module:
        """Its outputs are split, part by part."""
        return ColumnLinear(self._context, self._split, inputs, parts, bias=bias, init=init, norm=norm)

    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        """Its inputs are split."""
        return RowLinear(self._context, self._split, inputs, outputs, bias=bias, init=init)

    def vocab_embedding(self, vocab: int, hidden: int, *, init: Init) -> nn.Module:
        """Its rows are split."""
        return VocabEmbedding(self._context, self._split, vocab, hidden, init)

    def output_layer(self, vocab: int, hidden: int, *, init: Init, weight: Parameter | None = None) -> nn.Module:
        """Its rows are split as the embedding's, whose weight it may share."""
        return OutputLayer(self._context, self._split, vocab, hidden, init, weight)

    def norm(self, kind: Literal["layernorm", "rmsnorm"], size: int, eps: float = 1e-5) -> nn.Module:
        """Whole on every rank; under sequence parallelism each sees s/t tokens, so its gradient is a part of a sum."""
        norm: Any = (LayerNorm if kind == "layernorm" else RmsNorm)(self._context, size, eps)
        if self._split.sequence:
            specs = norm.parameter_specs.items()
            norm.parameter_specs = {name: replace(spec, partial_over="tensor") for name, spec in specs}
        made: nn.Module = norm
        return made

    def dropout(self, p: float) -> nn.Module:
        """Alike on every rank, or, under sequence parallelism, of each rank's own tokens."""
        return nn.Dropout(p) if self._split.sequence else ReplicatedDropout(p, self._context.rng)

    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        """This rank's heads; its key-value heads are those that its query heads share."""
        self._split.part(shape.heads, "attention heads (model.num_heads)")
        self._split.part(shape.kv_heads, "key-value heads (model.num_kv_heads)")
        return CoreAttention(dropout)

    def cross_entropy(self, vocab: int, label_smoothing: float = 0.0) -> nn.Module:
        """Only scalars of each token cross ranks, never logits."""
        return CrossEntropy(vocab, label_smoothing, self._split.peers)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Serves tensor and sequence parallelism, and would like two ranks."""
    return PluginInfo(
        "parallel-layer",
        "tensor",
        options=Options,
        provides=frozenset({"parallel.tensor", "parallel.sequence"}),
        suggests={"parallel.tensor": 2},
    )


@hookimpl
def megatron_run_create_parallel_layer(context: BuildContext, options: Options) -> ParallelLayers:
    """Make the factory for the tensor-parallel ranks of ``context``."""
    peers = context.groups.peers(context.topology, "tensor")
    return TensorLayers(context, Split(peers, context.sequence_shards > 1, options.overlap))
