"""Parallel layers ``dense``: unsplit layers on one rank, and the reference for every other factory.

Legend: s sequence, b micro batch, h hidden, n heads, k key-value heads, d head size, v vocabulary, p padded vocabulary.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_run.contracts import Init, ParallelLayers, ParameterSpec, Part, PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.nn import (
    CoreAttention,
    CrossEntropy,
    Dropout,
    LinearCrossEntropy,
    LinearLayer,
    embed,
    empty_parameter,
    make_norm,
)
from megatron_run_engine.nn.linear import linear
from megatron_run_engine.nn.parallel import (
    ExpertColumnLinear,
    ExpertRowLinear,
    LayerSplit,
    rows_of_a_rank,
    vocabulary_spec,
)
from megatron_run_engine.runtime.comm import ALONE

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import AttentionShape, LinearPart, LinearSpec, NormKind
    from megatron_run_engine.nn import Activation
    from megatron_run_engine.runtime.context import BuildContext


class Linear(LinearLayer):
    """``x @ weight.T + bias``, whose weight gradient is submitted to the accumulator.

    ``parts`` are the logical matrices stacked in the rows of ``weight``, in order; without parts it is one matrix.
    ``norm`` is applied to x first.
    """

    activates = True

    def __init__(
        self,
        context: BuildContext,
        spec: LinearSpec,
        parts: tuple[LinearPart, ...] = (),
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.gradients = context.gradients
        self.norm = norm
        self.weight = empty_parameter(context, spec.features, spec.inputs)
        self.bias = empty_parameter(context, spec.features) if spec.bias else None
        self.parameter_specs = {
            "weight": ParameterSpec(spec.init, _stacked("weight", parts, (spec.inputs,))),
            "bias": ParameterSpec(Init("zeros"), _stacked("bias", parts, ())),
        }

    def forward(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """[s, b, inputs] -> [s, b, outputs]."""
        x = x if self.norm is None else self.norm(x)
        return linear(x, self.weight, self.bias, self.gradients, self.products, activation)


class VocabEmbedding(nn.Module):
    """A row of ``weight`` [p, h] for each token."""

    def __init__(self, context: BuildContext, vocab: int, hidden: int, init: Init) -> None:
        super().__init__()
        self.gradients = context.gradients
        self.weight = empty_parameter(context, rows_of_a_rank(vocab), hidden)
        self.parameter_specs = {"weight": vocabulary_spec(vocab, hidden, init)}

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] -> [s, b, h]."""
        return embed(tokens.t(), self.weight, self.gradients)


class OutputLayer(nn.Module):
    """Logits over the padded vocabulary. ``weight`` [p, h] is its own or the word embedding's."""

    def __init__(
        self, context: BuildContext, vocab: int, hidden: int, init: Init, weight: Parameter | None = None
    ) -> None:
        super().__init__()
        self.gradients = context.gradients
        self.weight = empty_parameter(context, rows_of_a_rank(vocab), hidden) if weight is None else weight
        self.parameter_specs = {"weight": vocabulary_spec(vocab, hidden, init)}

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, p]."""
        return linear(x, self.weight, None, self.gradients)


class DenseLayers(ParallelLayers):
    """Makes the layers of a rank without tensor parallelism (t = 1)."""

    def __init__(self, context: BuildContext) -> None:
        self._context = context

    def column_linear(self, spec: LinearSpec, norm: nn.Module | None = None) -> nn.Module:
        """Make a linear layer with all output features."""
        return Linear(self._context, spec, spec.parts, norm)

    def row_linear(self, spec: LinearSpec) -> nn.Module:
        """Make a linear layer with all input features."""
        return Linear(self._context, spec)

    def vocab_embedding(self, vocab: int, hidden: int, *, init: Init) -> nn.Module:
        """Make an embedding of the whole vocabulary."""
        return VocabEmbedding(self._context, vocab, hidden, init)

    def output_layer(self, vocab: int, hidden: int, *, init: Init, weight: Parameter | None = None) -> nn.Module:
        """Make an output layer over the whole vocabulary, with its own weight or a shared one."""
        return OutputLayer(self._context, vocab, hidden, init, weight)

    def enter_region(self, x: Tensor) -> Tensor:
        """Return x: the region is this rank alone."""
        return x

    def leave_region(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def expert_column_linear(self, experts: range, spec: LinearSpec) -> nn.Module:
        """Make a linear layer with all output features of each expert."""
        return ExpertColumnLinear(self._context, LayerSplit(ALONE), experts, spec)

    def expert_row_linear(self, experts: range, spec: LinearSpec) -> nn.Module:
        """Make a linear layer with all input features of each expert."""
        return ExpertRowLinear(self._context, LayerSplit(ALONE), experts, spec)

    def norm(self, kind: NormKind, size: int, eps: float = 1e-5) -> nn.Module:
        """Make a norm over the last dimension."""
        return make_norm(self._context, kind, size, eps)

    def dropout(self, p: float) -> nn.Module:
        """Make a dropout that draws from the device's default generator, which is positioned before each segment."""
        return Dropout(p)

    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        """Make the attention of all heads."""
        return CoreAttention.shaped(shape, dropout)

    def cross_entropy(self, vocab: int, label_smoothing: float = 0.0) -> nn.Module:
        """Make a cross-entropy over the whole vocabulary."""
        return CrossEntropy(vocab, label_smoothing)

    def linear_cross_entropy(self, vocab: int, label_smoothing: float, chunks: int) -> nn.Module:
        """Make output layer and cross-entropy in one."""
        return LinearCrossEntropy(self._context.gradients, vocab, label_smoothing, chunks)


def _stacked(name: str, parts: tuple[LinearPart, ...], columns: tuple[int, ...]) -> tuple[Part, ...]:
    """Return where the logical tensors ``<part>.<name>`` lie in the rows of a fused parameter."""
    stops = list(accumulate(part.features for part in parts))
    return tuple(
        Part(f"{part.name}.{name}", (part.features, *columns), range(stop - part.features, stop))
        for part, stop in zip(parts, stops, strict=True)
    )


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("parallel-layer", "dense")


@hookimpl
def megatron_run_create_parallel_layer(context: BuildContext) -> ParallelLayers:
    """Make the factory."""
    return DenseLayers(context)
