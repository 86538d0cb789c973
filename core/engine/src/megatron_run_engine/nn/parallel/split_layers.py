"""What factories of split layers share: everything but the linear layers, the norms and the core of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from megatron_run.contracts import ParallelLayers
from megatron_run_engine.nn.cross_entropy import CrossEntropy
from megatron_run_engine.nn.parallel.dropout import ReplicatedDropout
from megatron_run_engine.nn.parallel.expert_linear import ExpertColumnLinear, ExpertRowLinear
from megatron_run_engine.nn.parallel.mappings import f, g, gather_sequence, scatter_sequence
from megatron_run_engine.nn.parallel.vocabulary import OutputLayer, VocabEmbedding

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts import AttentionShape, Init, LinearPart
    from megatron_run_engine.nn.parallel.tensor_split import Split
    from megatron_run_engine.runtime.context import BuildContext


class SplitLayers(ParallelLayers):
    """A factory whose layers the ranks of one axis share: the ends of a model, experts, dropout and the loss."""

    def __init__(self, context: BuildContext, split: Split) -> None:
        self.context, self.split = context, split
        if split.sequence:
            split.part(context.train.sequence_length, "tokens of train.sequence_length")

    def vocab_embedding(self, vocab: int, hidden: int, *, init: Init) -> nn.Module:
        """Its rows are split."""
        return VocabEmbedding(self.context, self.split, vocab, hidden, init)

    def output_layer(self, vocab: int, hidden: int, *, init: Init, weight: Parameter | None = None) -> nn.Module:
        """Its rows are split as the embedding's, whose weight it may share."""
        return OutputLayer(self.context, self.split, vocab, hidden, init, weight)

    def dropout(self, p: float) -> nn.Module:
        """Alike on every rank, or, under sequence parallelism, of each rank's own tokens."""
        return nn.Dropout(p) if self.split.sequence else ReplicatedDropout(p, self.context.rng)

    def cross_entropy(self, vocab: int, label_smoothing: float = 0.0) -> nn.Module:
        """Only scalars of each token cross ranks, never logits."""
        return CrossEntropy(vocab, label_smoothing, self.split.peers)

    def enter_region(self, x: Tensor) -> Tensor:
        """As a column-parallel layer does."""
        return (gather_sequence if self.split.sequence else f)(x, self.split.peers)

    def leave_region(self, x: Tensor) -> Tensor:
        """As a row-parallel layer does."""
        if self.split.sequence:
            return scatter_sequence(x, self.split.peers)
        return g(x.clone(), self.split.peers)  # in place, and x may be a view of what autograd keeps

    def expert_column_linear(
        self, experts: range, inputs: int, parts: tuple[LinearPart, ...], *, bias: bool, init: Init
    ) -> nn.Module:
        """The outputs of each expert are split."""
        return ExpertColumnLinear(self.context, self.split, experts, inputs, parts, bias=bias, init=init)

    def expert_row_linear(self, experts: range, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        """The inputs of each expert are split."""
        return ExpertRowLinear(self.context, self.split, experts, inputs, outputs, bias=bias, init=init)

    def check_heads(self, shape: AttentionShape) -> None:
        """Raise :class:`InputError` with the arithmetic unless heads and key-value heads both split evenly."""
        self.split.part(shape.heads, "attention heads (model.num_heads)")
        self.split.part(shape.kv_heads, "key-value heads (model.num_kv_heads)")
