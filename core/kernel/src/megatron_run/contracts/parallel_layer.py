"""The contract of kind ``parallel-layer``: the layers from which a model is built.

Legend: s sequence, b micro batch, h hidden, n heads, k key-value heads, d head size, v vocabulary, t tensor-parallel
size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_run.contracts.parameters import Init

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class LinearPart:
    """One of the logical matrices that a fused linear layer computes at once: q, k, v, or gate and up.

    ``key`` is the configuration key that sets ``features``, where there is one: an error names it.
    """

    name: str
    features: int
    key: str = ""

    def __str__(self) -> str:
        return f"features of {self.name}" + (f" ({self.key})" if self.key else "")


@dataclass(frozen=True)
class AttentionShape:
    """``heads`` query heads share ``kv_heads`` key-value heads of size ``head_size``; ``layer`` is its global index."""

    heads: int
    kv_heads: int
    head_size: int
    layer: int


class ParallelLayers(ABC):
    """A factory of layers. x is [s, b, h] everywhere ([s/t, b, h] between blocks with sequence parallelism).

    A layer that is split gets the ranks that share it as an argument, a
    :class:`megatron_run_engine.runtime.comm.ParallelGroup`, so that the same layer can be split over another axis. What
    the kernel itself knows of splitting is bound to the tensor-parallel ranks: ``context.sequence_shards``, learned
    positions, random streams, and which rank's copy of a whole parameter counts.

    Parameters are created uninitialised, with ``parameter_specs`` on their module saying how they start and which
    logical tensors they hold; the names of parameters and parts are the canonical ones (``weight``, ``bias``,
    ``query.weight``), whatever the factory, so that checkpoints cross over. Weight gradients should be handed to
    ``context.gradients.submit``, which lets a schedule split the backward; a layer that does not is still right.

    Factories stack: ``create_parallel_layer(context, options, base)`` may return an object that overrides some
    methods and passes the rest to ``base``. A whole working plugin::

        class MyNorms(StackedLayers):
            def norm(self, kind, size, eps=1e-5):
                return MyNorm(size, eps)

        @hookimpl
        def megatron_run_create_parallel_layer(context, options, base):
            return MyNorms(base)
    """

    @abstractmethod
    def column_linear(
        self,
        inputs: int,
        parts: tuple[LinearPart, ...],
        *,
        bias: bool,
        init: Init,
        norm: nn.Module | None = None,
    ) -> nn.Module:
        """[s, b, inputs] -> [s, b, sum(features) / t]: output features are split, part by part.

        ``norm``, made by :meth:`norm` of the whole stack, is applied to the input first and becomes the child ``norm``
        of the layer, which a factory may fuse with the product.
        """

    @abstractmethod
    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        """[s, b, inputs / t] -> [s, b, outputs]: input features are split and partial products summed."""

    @abstractmethod
    def vocab_embedding(self, vocab: int, hidden: int, *, init: Init) -> nn.Module:
        """Tokens [b, s] -> [s, b, hidden]; ``weight`` [padded vocab / t, hidden]."""

    @abstractmethod
    def output_layer(self, vocab: int, hidden: int, *, init: Init, weight: nn.Parameter | None = None) -> nn.Module:
        """[s, b, hidden] -> logits [s, b, padded vocab / t]. ``weight`` is a parameter of this rank to share."""

    @abstractmethod
    def norm(self, kind: Literal["layernorm", "rmsnorm"], size: int, eps: float = 1e-5) -> nn.Module:
        """[s, b, size] -> [s, b, size]."""

    @abstractmethod
    def dropout(self, p: float) -> nn.Module:
        """Dropout outside tensor-parallel regions: the mask is equal on all tensor-parallel ranks."""

    @abstractmethod
    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        """(query [s, b, n/t, d], key and value [s, b, k/t, d], mask or None for causal) -> [s, b, n/t * d]."""

    @abstractmethod
    def cross_entropy(self, vocab: int, label_smoothing: float = 0.0) -> nn.Module:
        """(logits [s, b, padded vocab / t], labels [b, s]) -> loss per token [s, b], fp32; padding is no class.

        While training, ``label_smoothing`` e mixes ``(1 - e) * nll + e * mean over the vocabulary of -log p`` (Szegedy
        et al. 2016, as PyTorch defines it); an evaluation scores the plain loss.
        """

    @abstractmethod
    def enter_region(self, x: Tensor) -> Tensor:
        """Enter a tensor-parallel region: [s, b, *] or [s/t, b, *] -> [s, b, *], equal on all of its ranks.

        For what lies between the two ends of a region and is no pair of layers of this factory: a router sees all
        tokens on every rank, and the gradients of what it computes there are parts of a sum over the ranks, its
        parameters' (``ParameterSpec.partial_over="tensor"``) as well as that of x.
        """

    @abstractmethod
    def leave_region(self, x: Tensor) -> Tensor:
        """Leave it: the results [s, b, *] of all ranks add up -> [s, b, *] or [s/t, b, *]."""

    @abstractmethod
    def expert_column_linear(
        self, experts: range, inputs: int, parts: tuple[LinearPart, ...], *, bias: bool, init: Init
    ) -> nn.Module:
        """(rows [n, inputs], counts [held]) -> [n, sum(features) / t]: each expert's rows times its own matrix.

        Within a region. ``experts`` are the numbers of those that this rank holds; the others are its peers'. Rows lie
        in their order, ``counts[i]`` of the i-th: int64, on the CPU. The logical tensors of expert e are
        called ``e.<part>.weight`` and ``e.<part>.bias``, and ``ParameterSpec.replicas`` is ``expert_data``.
        """

    @abstractmethod
    def expert_row_linear(self, experts: range, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        """(rows [n, inputs / t], counts [held]) -> [n, outputs], which still is to be summed by :meth:`leave_region`.

        As :meth:`expert_column_linear`, its tensors called ``e.weight`` and ``e.bias``. The bias is part of the sum.
        """

    def forward_pass(self) -> AbstractContextManager[object]:
        """What the forward of a whole chunk runs in, asked for anew each time; by default nothing.

        A segment that runs outside of a chunk's forward has a context of its own
        (:class:`megatron_run_engine.nn.ForwardPass`): one that is captured, and one of a layer that is computed again
        in the backward.
        """
        return nullcontext()


class StackedLayers(ParallelLayers):
    """Passes everything to ``base``; a plugin that changes one layer derives from it."""

    def __init__(self, base: ParallelLayers) -> None:
        self.base = base

    def column_linear(
        self,
        inputs: int,
        parts: tuple[LinearPart, ...],
        *,
        bias: bool,
        init: Init,
        norm: nn.Module | None = None,
    ) -> nn.Module:
        """As ``base``."""
        return self.base.column_linear(inputs, parts, bias=bias, init=init, norm=norm)

    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        """As ``base``."""
        return self.base.row_linear(inputs, outputs, bias=bias, init=init)

    def vocab_embedding(self, vocab: int, hidden: int, *, init: Init) -> nn.Module:
        """As ``base``."""
        return self.base.vocab_embedding(vocab, hidden, init=init)

    def output_layer(self, vocab: int, hidden: int, *, init: Init, weight: nn.Parameter | None = None) -> nn.Module:
        """As ``base``."""
        return self.base.output_layer(vocab, hidden, init=init, weight=weight)

    def norm(self, kind: Literal["layernorm", "rmsnorm"], size: int, eps: float = 1e-5) -> nn.Module:
        """As ``base``."""
        return self.base.norm(kind, size, eps)

    def dropout(self, p: float) -> nn.Module:
        """As ``base``."""
        return self.base.dropout(p)

    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        """As ``base``."""
        return self.base.core_attention(shape, dropout)

    def cross_entropy(self, vocab: int, label_smoothing: float = 0.0) -> nn.Module:
        """As ``base``."""
        return self.base.cross_entropy(vocab, label_smoothing)

    def enter_region(self, x: Tensor) -> Tensor:
        """As ``base``."""
        return self.base.enter_region(x)

    def leave_region(self, x: Tensor) -> Tensor:
        """As ``base``."""
        return self.base.leave_region(x)

    def expert_column_linear(
        self, experts: range, inputs: int, parts: tuple[LinearPart, ...], *, bias: bool, init: Init
    ) -> nn.Module:
        """As ``base``."""
        return self.base.expert_column_linear(experts, inputs, parts, bias=bias, init=init)

    def expert_row_linear(self, experts: range, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        """As ``base``."""
        return self.base.expert_row_linear(experts, inputs, outputs, bias=bias, init=init)

    def forward_pass(self) -> AbstractContextManager[object]:
        """As ``base``."""
        return self.base.forward_pass()
