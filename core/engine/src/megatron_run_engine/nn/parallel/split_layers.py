"""The common base of split-layer factories: all layers except the linear ones, norms and the attention core.

Embedding and output layer are split along the vocabulary. Linear layers of experts split each expert's matrix like that
of a column- or row-parallel layer. They contain no collectives: those at the edges of the surrounding region serve all
of its layers.

Legend: s sequence, b micro batch, h hidden, v vocabulary, p padded vocabulary, e experts of this rank, n rows of all of
them, i inputs, o outputs, t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_run.contracts import Init, ParallelLayers, ParameterSpec, Part
from megatron_run_engine.nn.cross_entropy import CrossEntropy, LinearCrossEntropy
from megatron_run_engine.nn.device_groups import takes_counts
from megatron_run_engine.nn.dropout import Dropout
from megatron_run_engine.nn.embedding import embed
from megatron_run_engine.nn.grouped import GroupedLayer, grouped_linear
from megatron_run_engine.nn.parallel.mappings import column_linear, f, g, gather_sequence, scatter_sequence
from megatron_run_engine.nn.parameter import empty_parameter, owned
from megatron_run_engine.runtime.comm import ALONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.nn import Parameter

    from megatron_run.contracts import AttentionShape, LinearSpec
    from megatron_run_engine.nn.parallel.mappings import LayerSplit
    from megatron_run_engine.runtime.comm import ParallelGroup
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_engine.runtime.rng import RandomStreams

#: The number of rows of a rank is a multiple of this, as in Megatron-LM: a matrix product over 50304 columns is much
#: faster than over 50257. Padding rows start at zero, are not classes of the cross entropy, and so stay at zero.
#: Names, initial values, checkpoints and parameter counts cover the unpadded rows only.
ROWS_MULTIPLE = 128


class VocabEmbedding(nn.Module):
    """Each rank looks up the tokens whose rows it holds and takes zeros for the others; the sum is complete."""

    def __init__(self, context: BuildContext, split: LayerSplit, vocab: int, hidden: int, init: Init) -> None:
        super().__init__()
        self.gradients, self.split = context.gradients, split
        rows = rows_of_a_rank(vocab, split.peers)
        self.first, self.stop = split.peers.index * rows, split.peers.size * rows
        self.weight = empty_parameter(context, rows, hidden)
        self.parameter_specs = {"weight": vocabulary_spec(vocab, hidden, init, split.peers)}

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] -> [s, b, h] or [s/t, b, h]."""
        row, local = owned(tokens.t(), self.first, len(self.weight), self.stop)  # [s, b]
        found = embed(row, self.weight, self.gradients)  # [s, b, h]
        partial = found.masked_fill(~local[..., None], 0.0)
        leave = scatter_sequence if self.split.sequence else g
        return leave(partial, self.split.peers)


class OutputLayer(nn.Module):
    """Logits for this rank's part of the padded vocabulary; ``weight`` [p/t, h] is its own or the embedding's."""

    def __init__(
        self,
        context: BuildContext,
        split: LayerSplit,
        vocab: int,
        hidden: int,
        init: Init,
        weight: Parameter | None = None,
    ) -> None:
        super().__init__()
        self.gradients, self.split = context.gradients, split
        rows = rows_of_a_rank(vocab, split.peers)
        self.weight = empty_parameter(context, rows, hidden) if weight is None else weight
        self.parameter_specs = {"weight": vocabulary_spec(vocab, hidden, init, split.peers)}

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] or [s/t, b, h] -> [s, b, p/t]."""
        return column_linear(x, self.weight, None, self.gradients, self.split)


def rows_of_a_rank(vocab: int, peers: ParallelGroup = ALONE) -> int:
    """Rows of one rank, p/t: a multiple of :data:`ROWS_MULTIPLE`. 50257 over 8 ranks is padded to 51200 in all."""
    return -(-vocab // (ROWS_MULTIPLE * peers.size)) * ROWS_MULTIPLE


def vocabulary_spec(vocab: int, hidden: int, init: Init, peers: ParallelGroup = ALONE) -> ParameterSpec:
    """Spec of a ``weight`` [p/t, hidden]: it covers this rank's unpadded rows, which may be none."""
    rows = rows_of_a_rank(vocab, peers)
    first = min(peers.index * rows, vocab)
    real = min(rows, vocab - first)
    return ParameterSpec(init, (Part("weight", (vocab, hidden), range(real), start=first),))


class ExpertColumnLinear(GroupedLayer):
    """Column-parallel: computes this rank's share of the output features of each of ``parts``, for each expert."""

    def __init__(self, context: BuildContext, split: LayerSplit, experts: range, spec: LinearSpec) -> None:
        super().__init__()
        self.gradients = context.gradients
        inputs, rows = spec.inputs, split.features(spec.parts)
        self.takes_device_counts = takes_counts(context.trains_on, context.dtypes.param, (inputs, rows))
        self.weight = empty_parameter(context, len(experts) * rows, inputs)
        self.bias = empty_parameter(context, len(experts) * rows) if spec.bias else None
        weights, biases = split.rows_of("weight", spec.parts, (inputs,)), split.rows_of("bias", spec.parts)
        self.parameter_specs = {
            "weight": ParameterSpec(spec.init, tuple(_per_expert(experts, weights, rows)), replicas="expert_replicas"),
            "bias": ParameterSpec(Init("zeros"), tuple(_per_expert(experts, biases, rows)), replicas="expert_replicas"),
        }

    def forward(self, rows: Tensor, counts: Tensor | int) -> Tensor:
        """[n, i] -> [n, o/t]."""
        return grouped_linear(rows, self.weight, self.bias, counts, self.gradients)


class ExpertRowLinear(GroupedLayer):
    """Row-parallel: takes this rank's share of the input features and returns one of t terms of the output.

    Each rank adds 1/t of the bias, so that the sum over the ranks contains it once.
    """

    def __init__(self, context: BuildContext, split: LayerSplit, experts: range, spec: LinearSpec) -> None:
        super().__init__()
        self.gradients, self.bias_share = context.gradients, 1 / split.peers.size
        features, outputs = split.part(spec.inputs, "input features"), spec.features
        self.takes_device_counts = takes_counts(context.trains_on, context.dtypes.param, (features, outputs))
        self.weight = empty_parameter(context, len(experts) * outputs, features)
        self.bias = empty_parameter(context, len(experts) * outputs) if spec.bias else None
        weights, biases = split.columns_of("weight", spec.inputs, outputs), (Part("bias", (outputs,), range(outputs)),)
        self.parameter_specs = {
            "weight": ParameterSpec(
                spec.init, tuple(_per_expert(experts, weights, outputs)), replicas="expert_replicas"
            ),
            "bias": ParameterSpec(
                Init("zeros"),
                tuple(_per_expert(experts, biases, outputs)),
                partial_over=split.axis if split.peers.size > 1 else None,
                replicas="expert_replicas",
            ),
        }

    def forward(self, rows: Tensor, counts: Tensor | int) -> Tensor:
        """[n, i/t] -> [n, o]."""
        return grouped_linear(rows, self.weight, self.bias, counts, self.gradients, self.bias_share)


def _per_expert(experts: range, parts: tuple[Part, ...], rows: int) -> Iterator[Part]:
    """``parts``, which describe one expert's ``rows``, repeated for each of ``experts``, whose rows are stacked."""
    for index, expert in enumerate(experts):
        for part in parts:
            local = range(part.local.start + index * rows, part.local.stop + index * rows)
            yield replace(part, name=f"{expert}.{part.name}", local=local)


class ReplicatedDropout(nn.Dropout):
    """Dropout whose mask is equal on all tensor-parallel ranks: it draws from the replicated random stream.

    PyTorch's dropout takes no generator. Like it, this one keeps one byte per value for the backward.
    """

    def __init__(self, p: float, streams: RandomStreams) -> None:
        super().__init__(p)
        self.streams = streams

    def forward(self, x: Tensor) -> Tensor:
        """[*] -> [*]: zero with probability p, otherwise scaled by 1 / (1 - p); x itself in evaluation."""
        if not self.training or not self.p:
            return x
        result: Tensor = _Dropout.apply(x, self.p, self.streams.replicated)  # type: ignore[no-untyped-call]  # torch's
        return result


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, generator: torch.Generator) -> Tensor:
        kept = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p, generator=generator)
        ctx.save_for_backward(kept)
        ctx.p = p
        return _keep(x, kept, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return _keep(grads[0], kept, ctx.p), None, None


def _keep(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """The ``kept`` values of x, scaled; a 16-bit result is rounded once, since masking is exact."""
    return (x * kept).mul_(1 / (1 - p))


class SplitLayers(ParallelLayers):
    """A factory of layers split over one axis: embedding, output layer, experts, dropout and the loss."""

    def __init__(self, context: BuildContext, split: LayerSplit) -> None:
        self.context, self.split = context, split
        if split.sequence:
            split.part(context.pieces.part(context.train.sequence_length), "tokens of train.sequence_length")

    def vocab_embedding(self, vocab: int, hidden: int, *, init: Init) -> nn.Module:
        """An embedding whose rows are split."""
        return VocabEmbedding(self.context, self.split, vocab, hidden, init)

    def output_layer(self, vocab: int, hidden: int, *, init: Init, weight: Parameter | None = None) -> nn.Module:
        """An output layer whose rows are split like the embedding's, whose weight it may share."""
        return OutputLayer(self.context, self.split, vocab, hidden, init, weight)

    def dropout(self, p: float) -> nn.Module:
        """One mask for all ranks; under sequence parallelism each rank draws for its own tokens.

        A single rank draws from the default stream, as layers that are not split do: it drops the same values.
        """
        alone = self.split.peers.size == 1
        return Dropout(p) if self.split.sequence or alone else ReplicatedDropout(p, self.context.rng)

    def cross_entropy(self, vocab: int, label_smoothing: float = 0.0) -> nn.Module:
        """A loss that exchanges a few scalars per token, never logits."""
        return CrossEntropy(vocab, label_smoothing, self.split.peers)

    def linear_cross_entropy(self, vocab: int, label_smoothing: float, chunks: int) -> nn.Module:
        """Output layer and loss in one; x is gathered once, and the loss exchanges scalars once."""
        return LinearCrossEntropy(
            self.context.gradients, vocab, label_smoothing, chunks, self.split.peers, self.enter_region
        )

    def enter_region(self, x: Tensor) -> Tensor:
        """Enter as a column-parallel layer does."""
        return (gather_sequence if self.split.sequence else f)(x, self.split.peers)

    def leave_region(self, x: Tensor) -> Tensor:
        """Leave as a row-parallel layer does."""
        if self.split.sequence:
            return scatter_sequence(x, self.split.peers)
        return g(x.clone(), self.split.peers)  # a copy: g works in place, and x may be a view of a saved tensor

    def expert_column_linear(self, experts: range, spec: LinearSpec) -> nn.Module:
        """Experts whose output features are split."""
        return ExpertColumnLinear(self.context, self.split, experts, spec)

    def expert_row_linear(self, experts: range, spec: LinearSpec) -> nn.Module:
        """Experts whose input features are split."""
        return ExpertRowLinear(self.context, self.split, experts, spec)

    def check_heads(self, shape: AttentionShape) -> None:
        """Raise :class:`InputError` with the arithmetic unless heads and key-value heads both split evenly."""
        self.split.part(shape.heads, "attention heads (model.num_heads)")
        self.split.part(shape.kv_heads, "key-value heads (model.num_kv_heads)")
