"""Word and position embedding.

Legend: s sequence, b micro batch, h hidden, v vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import ParameterSpec, Segment
from megatron_run.errors import InputError
from megatron_run_engine.nn.parameter import empty_parameter
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_engine.runtime.sample_cut import held

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import Decoding, ParallelLayers
    from megatron_run.contracts.schedule import Place
    from megatron_run_engine.nn.spec import TransformerSpec
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_engine.runtime.gradients import GradientAccumulator


def embed(tokens: Tensor, weight: Parameter, gradients: GradientAccumulator) -> Tensor:
    """Rows of ``weight`` [v, h] at ``tokens`` [*] -> [*, h]; the weight gradient goes to ``gradients``.

    The gradient is added into the rows that were looked up, without an intermediate dense gradient of size [v, h].
    """
    if not torch.is_grad_enabled():
        return F.embedding(tokens, weight)
    result: Tensor = _Embed.apply(tokens, weight, gradients)  # type: ignore[no-untyped-call]  # torch's
    return result


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Parameter, gradients: GradientAccumulator) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.gradients = weight, gradients  # the parameter itself, which has main_grad: see linear.py
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (tokens,), (grad,), weight = ctx.saved_tensors, grads, ctx.weight
        if weight.requires_grad:
            flat, rows = tokens.flatten(), grad.flatten(0, -2)  # [N], [N, h]

            def compute() -> None:
                total = main_grad(weight)
                total.index_add_(0, flat, rows.to(total.dtype))

            ctx.gradients.submit((weight,), compute)
        return None, None, None


class Positions(nn.Module):
    """Learned positions: one row of ``weight`` [s, h] per position in the sequence.

    Under sequence parallelism x holds this rank's positions only, so each tensor-parallel rank computes a part of the
    gradient (``partial_over``).
    """

    def __init__(self, context: BuildContext, spec: TransformerSpec) -> None:
        super().__init__()
        split = context.sequence_shards > 1
        self.shard, self.pieces = context.topology.tensor_rank if split else 0, context.pieces
        self.parts = context.sequence_shards * context.pieces.ranks
        self.weight = empty_parameter(context, spec.sequence_length, spec.hidden)
        self.parameter_specs = {"weight": ParameterSpec(spec.init, partial_over="tensor" if split else None)}

    def forward(self, x: Tensor, decoding: Decoding | None = None, positions: Tensor | None = None) -> Tensor:
        """Add positions: [s/t, b, h] -> [s/t, b, h]. ``positions`` [b, s] are those of all ranks' tokens."""
        positions = positions if decoding is None else decoding.positions
        first = self.shard * len(x) + (0 if decoding is None else decoding.first)
        if positions is not None:
            local = positions if decoding is not None else positions[:, first : first + len(x)]
            return x + F.embedding(local.t(), self.weight)  # [b, s] -> [s, b, h]
        if self.pieces.ranks == 1:
            return x + self.weight[first : first + len(x), None]
        rows = held(self.weight[: self.parts * len(x)], self.pieces)  # [s/C, h]
        return x + rows[first : first + len(x), None]


class Embedding(nn.Module):
    """The first layer of a model: word embedding, learned positions unless the model uses rotary ones, dropout."""

    def __init__(self, context: BuildContext, spec: TransformerSpec, layers: ParallelLayers) -> None:
        super().__init__()
        self.longest, self.scale = spec.sequence_length, spec.embedding_scale
        self.ranks = context.pieces.ranks
        self.word = layers.vocab_embedding(spec.vocab, spec.hidden, init=spec.init)
        self.position = Positions(context, spec) if spec.position == "learned" else None
        self.dropout = layers.dropout(spec.dropout)
        self.draws = spec.dropout > 0
        self.reads = embedding_fields(context, spec)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, *, decoding: Decoding | None = None) -> Tensor:
        """Tokens [b, s] -> [s, b, h], or [s/t, b, h] under sequence parallelism.

        Raises InputError when s is above the model's sequence length.
        """
        length = tokens.shape[1] * self.ranks
        if length > self.longest:
            raise InputError(
                f"a sequence of {length} tokens is longer than the model's {self.longest}",
                fix="raise train.sequence_length",
            )
        x = self.word(tokens)
        x = x if self.scale == 1 else x * self.scale
        result: Tensor = self.dropout(x if self.position is None else self.position(x, decoding, positions))
        return result

    def segment(self) -> Segment:
        """The whole layer as one segment, layer -1 of the model."""
        read = tuple(self.parameters())
        inputs = ("tokens", *self.reads)
        return Segment("embedding", -1, 0, self, inputs, ("x",), read, draws=self.draws, decodes=True)


#: The canonical name of the word embedding, which a tied output layer shares.
WORD = "embedding.word.weight"


def tie_to_word(module: Any, position: int, layout: tuple[Place, ...], shared: dict[str, Parameter]) -> None:
    """Tie the matrix of ``module``, the word embedding or the output layer, to the one at the other end of the model.

    On one stage both are the same Parameter. On two stages they are copies with partial gradients, which the optimizer
    sums over both stages; the first copy counts in norms and checkpoints. ``module`` comes from a layer factory, so
    only its ``weight`` and ``parameter_specs`` are known.
    """
    module.weight = shared.setdefault(WORD, module.weight)
    first, last = layout[0].stage, layout[-1].stage
    specs: dict[str, ParameterSpec] = module.parameter_specs
    specs["weight"] = replace(
        specs["weight"],
        name=WORD,
        tie="embedding" if len(layout) > 1 else "",
        partial_over="tie" if first != last else None,
        counted=position == 0 or first == last,
    )


def embedding_fields(context: BuildContext, spec: TransformerSpec) -> tuple[str, ...]:
    """The fields that an embedding reads besides ``tokens``, out of those that the data has."""
    return tuple({"positions"} & context.fields) if spec.position == "learned" else ()
