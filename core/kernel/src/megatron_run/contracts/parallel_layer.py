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
from megatron_run.errors import InputError
from megatron_run.errors.wording import nearest_divisors, nearest_multiples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


@dataclass(frozen=True)
class LinearPart:
    """One of the logical matrices of a fused linear layer: query, key and value, or gate and up.

    ``key`` is the configuration key that sets ``features``, if there is one; errors name it.
    """

    name: str
    features: int
    key: str = ""

    def __str__(self) -> str:
        return f"features of {self.name}" + (f" ({self.key})" if self.key else "")


def even_part(size: int, ranks: int, what: str, axis: str = "tensor") -> int:
    """``size`` of ``what`` over ``ranks``. Raises :class:`InputError` with the arithmetic if it does not divide.

    Layers ask it while they are built, and planners before.
    """
    if size % ranks:
        raise InputError(
            f"{size} {what} do not split over {ranks} {axis}-parallel ranks: {size} / {ranks} = {size / ranks:g}",
            fix=f"set parallel.{axis} to {nearest_divisors(size, ranks)}, "
            f"or choose {nearest_multiples(size, ranks)} {what}",
        )
    return size // ranks


#: The norms of a model. The scale of one that ends in ``_1p`` is 1 plus its weight, which starts at zero.
NormKind = Literal["layernorm", "rmsnorm", "layernorm_1p", "rmsnorm_1p"]

#: What may differ from softmax(q k^T / sqrt(d)) v.
VARIANTS = ("scale", "window", "softcap")


@dataclass(frozen=True)
class AttentionShape:
    """``heads`` query heads share ``kv_heads`` key-value heads of ``head_size``; ``layer`` is its global index.

    ``scale`` replaces 1/sqrt(head_size). A query sees the last ``window`` tokens, itself included. ``softcap`` c makes
    c * tanh(x / c) of the scaled products before the mask.
    """

    heads: int
    kv_heads: int
    head_size: int
    layer: int
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None

    @property
    def variants(self) -> frozenset[str]:
        """Which of :data:`VARIANTS` are set."""
        return frozenset(name for name in VARIANTS if getattr(self, name) is not None)


@dataclass(frozen=True)
class Adapters:
    """Low-rank updates of frozen matrices: ``X.weight`` acts as ``X.weight + scale * X.<up>.weight @ X.<down>.weight``.

    ``X.<up>.weight`` is [outputs, rank], ``X.<down>.weight`` [rank, inputs], both logical tensors. ``name`` is that of
    the factory that made them. Saved steps hold only the adapters and record that. A run without the factory reads
    them merged. ``dropout`` is the rate with which their input was dropped in training, and of no effect otherwise.
    """

    name: str
    down: str
    up: str
    rank: int
    scale: float
    dropout: float = 0.0


class ParallelLayers(ABC):
    """A factory of the layers from which models are built.

    Activations are [s, b, h]; with sequence parallelism they are [s/t, b, h] between blocks.

    *Splitting.* A split layer takes the ranks that share it as an argument, a
    :class:`megatron_run_engine.runtime.comm.ParallelGroup`, so the same layer can be split over another axis. Only
    these parts of the engine are bound to the tensor-parallel axis: ``context.sequence_shards``, learned positions,
    random streams, and the choice of the rank whose copy of a replicated parameter counts.

    *Parameters* are created uninitialised. ``parameter_specs`` on their module declares their initial values and the
    logical tensors that they hold. Names of parameters and parts are canonical (``weight``, ``bias``,
    ``query.weight``) in every factory, so that checkpoints can be loaded with another factory.

    *Weight gradients* should be passed to ``context.gradients.submit``, which lets a schedule split the backward. A
    layer that leaves them to autograd is still correct.

    *Stacking.* ``create_parallel_layer(context, options, base)`` may return an object that overrides some methods and
    passes the others to ``base``. A whole working plugin::

        class MyNorms(StackedLayers):
            def norm(self, kind, size, eps=1e-5):
                return MyNorm(size, eps) if kind == "rmsnorm" else self.base.norm(kind, size, eps)

        @hookimpl
        def megatron_run_create_parallel_layer(context, options, base):
            return MyNorms(base)

    A layer that wraps one of the factory below holds it as its child ``base``, which adds nothing to the names of
    parameters: so weights keep their names whatever is stacked above.
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
        """[s, b, inputs] -> [s, b, sum(features) / t]: the output features of each part are split.

        ``norm``, created by :meth:`norm` of the whole stack, is applied to the input first. It becomes the layer's
        child ``norm``; a factory may fuse it with the product.
        """

    @abstractmethod
    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        """[s, b, inputs / t] -> [s, b, outputs]: input features are split, and partial products are summed."""

    @abstractmethod
    def vocab_embedding(self, vocab: int, hidden: int, *, init: Init) -> nn.Module:
        """Tokens [b, s] -> [s, b, hidden]; ``weight`` [padded vocab / t, hidden]."""

    @abstractmethod
    def output_layer(self, vocab: int, hidden: int, *, init: Init, weight: nn.Parameter | None = None) -> nn.Module:
        """[s, b, hidden] -> logits [s, b, padded vocab / t]. ``weight`` is this rank's parameter to share, if tied."""

    @abstractmethod
    def norm(self, kind: NormKind, size: int, eps: float = 1e-5) -> nn.Module:
        """[s, b, size] -> [s, b, size]. Raises :class:`megatron_run.errors.InputError` for other kinds."""

    @abstractmethod
    def dropout(self, p: float) -> nn.Module:
        """Dropout outside tensor-parallel regions: the mask is equal on all tensor-parallel ranks."""

    @abstractmethod
    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        """(query [s, b, n/t, d], key and value [c, b, k/t, d], mask or None for causal) -> [s, b, n/t * d].

        ``c`` is ``s``, except that a layer with a true attribute ``caches`` also takes the keys and values of earlier
        tokens, c > s: causal then means that the last query sees all keys. ``mask`` [b, 1, s, c] is true where a query
        may attend. Without the attribute, text is generated by reading all of it again for every token.

        Of what ``shape`` may ask for besides sizes, the layer names what it does in an attribute ``variants``, out of
        :data:`VARIANTS`; without it, a model that needs one is refused.

        A layer with a true attribute ``packs`` takes ``documents`` [b, d] after the mask, which is then None: attention
        is causal within each document (:data:`megatron_run.contracts.data.DOCUMENTS`). Others get that as a mask.
        """

    @abstractmethod
    def cross_entropy(self, vocab: int, label_smoothing: float = 0.0) -> nn.Module:
        """(logits [s, b, padded vocab / t], labels [b, s]) -> loss per token [s, b], fp32; padding is not a class.

        In training, ``label_smoothing`` e gives ``(1 - e) * nll + e * mean over the vocabulary of -log p`` (Szegedy et
        al. 2016, as PyTorch defines it); evaluations use the plain loss. The backward may write the gradient over
        logits that are no leaf: a model reads them before it, and no one else saves them for a backward.
        """

    def linear_cross_entropy(self, vocab: int, label_smoothing: float, chunks: int) -> nn.Module:
        """(x [s, b, h] or [s/t, b, h], the output layer's weight, labels [b, s]) -> loss per token [s, b], fp32.

        Output layer and :meth:`cross_entropy` in one, for 1/``chunks`` of the tokens at a time, so that whole logits
        never exist. Optional: raises :class:`megatron_run.errors.InputError` where a factory has none.
        """
        raise InputError(
            f"these parallel layers have no loss in chunks, which model.loss_chunks={chunks} asks for",
            fix="set model.loss_chunks=1",
        )

    @abstractmethod
    def enter_region(self, x: Tensor) -> Tensor:
        """Enter a tensor-parallel region: [s, b, *] or [s/t, b, *] -> [s, b, *], equal on all of its ranks.

        For code inside a region other than a column- and row-parallel pair, such as a router: it sees all tokens on
        every rank, and each rank computes a part of the gradients, both of its parameters
        (``ParameterSpec.partial_over="tensor"``) and of x.
        """

    @abstractmethod
    def leave_region(self, x: Tensor) -> Tensor:
        """Leave the region: sum the results [s, b, *] of all ranks -> [s, b, *] or [s/t, b, *]."""

    @abstractmethod
    def expert_column_linear(
        self, experts: range, inputs: int, parts: tuple[LinearPart, ...], *, bias: bool, init: Init
    ) -> nn.Module:
        """(rows [n, inputs], counts [held]) -> [n, sum(features) / t]: each expert's rows times its own matrix.

        The layer lies inside a region. ``experts`` are the indices of this rank's experts. Rows are sorted by expert,
        ``counts[i]`` of them for the i-th, integers on the CPU; an int in the place of ``counts`` is that of each, and
        then the layer can be captured. An engine's ``nn.grouped.GroupedLayer`` that ``takes_device_counts`` also takes
        counts on the device, which it does not read on the host, so that it can be captured with them.

        The logical tensors of expert e are named ``e.<part>.weight`` and ``e.<part>.bias``, and
        ``ParameterSpec.replicas`` is ``expert_data``.
        """

    @abstractmethod
    def expert_row_linear(self, experts: range, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        """(rows [n, inputs / t], counts [held]) -> [n, outputs], a partial sum that :meth:`leave_region` completes.

        As :meth:`expert_column_linear`, with tensors named ``e.weight`` and ``e.bias``. The complete sum contains the
        bias once.
        """

    def forward_pass(self) -> AbstractContextManager[object]:
        """The context in which a chunk's forward runs, created anew each time; by default an empty one.

        A segment that runs outside a chunk's forward enters a context of its own
        (:class:`megatron_run_engine.nn.ForwardPass`): when it is captured, and when it is recomputed in the backward.
        """
        return nullcontext()

    def finish(self, chunk: nn.Module) -> None:  # noqa: B027  # most factories leave the chunk as it is
        """Change the layers of ``chunk``, whose paths are known now, before its parameters are described.

        A factory with :meth:`adapters` freezes here all that is not theirs, by ``requires_grad``: what is frozen has
        neither gradient nor optimizer state, is never saved, and comes from ``run.init_from``.
        """

    def check_names(self, chunks: Sequence[nn.Module]) -> None:  # noqa: B027  # most factories name no layers
        """Raise :class:`megatron_run.errors.InputError` for an option that names no layer of any rank.

        ``chunks`` are the finished ones of this rank: another stage may have what they lack. Collective over the world;
        while a run is planned, it is called once with the chunks of all stages as if one rank held them.
        """

    def adapters(self) -> Adapters | None:
        """The tensors that are trained in place of the model's weights; None: the weights."""
        return None


class StackedLayers(ParallelLayers):
    """Passes every call to ``base``. Derive from it to change some layers of the factory below."""

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

    def norm(self, kind: NormKind, size: int, eps: float = 1e-5) -> nn.Module:
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

    def linear_cross_entropy(self, vocab: int, label_smoothing: float, chunks: int) -> nn.Module:
        """As ``base``."""
        return self.base.linear_cross_entropy(vocab, label_smoothing, chunks)

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

    def finish(self, chunk: nn.Module) -> None:
        """As ``base``."""
        self.base.finish(chunk)

    def check_names(self, chunks: Sequence[nn.Module]) -> None:
        """As ``base``."""
        self.base.check_names(chunks)

    def adapters(self) -> Adapters | None:
        """As ``base``."""
        return self.base.adapters()
