"""The model that is trained, and its split over devices: all that the planner knows of a run.

Legend: ``s`` sequence, ``b`` micro batch, ``h`` hidden, ``t`` tensor-parallel size, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from megatron_run.contracts.parallel_layer import even_part

#: Rows of the table of words on a rank come in multiples of these.
_ROWS = 128
#: Nothing, the core of the attention, the feed-forward half, or the whole layer: as `train.recompute` has it.
Recompute = Literal["none", "core", "mlp", "full"]


class Latent(NamedTuple):
    """Multi-head latent attention: features of the latents (0: queries have none), and of parts of a head."""

    keys: int
    queries: int
    rotating: int
    plain: int
    value: int


@dataclass(frozen=True)
class Model:
    """A decoder. ``kv_heads`` and ``ffn`` of 0 stand for ``heads`` and 4 x ``hidden``.

    ``gated`` feed-forward layers have a third matrix. With ``experts``, every layer but the ``dense_layers`` has that
    many feed-forward layers of width ``expert_ffn`` (0: ``ffn``), a token is routed to ``top_k``, and a shared one of
    ``shared_ffn``, with a gate of its own if ``shared_gate``. ``flash`` attention never stores its s x s scores.
    ``tied``: the head shares the embedding's matrix. ``predictors`` of further tokens follow the last layer: each a
    layer like the last, a matrix that joins two vectors, and the head's product. ``positions`` are learned vectors,
    ``head_extra`` weights of the head beside the product with the vocabulary, which it lacks without ``logits``, and
    ``pooled`` weights that see one token of a row. ``loss_chunks`` are the parts in which logits are made. With
    ``rotary`` positions rotated queries and keys are kept beside the projection's, with ``dropout`` its masks, and with
    ``keeps_gate`` the gate's activation. ``biased`` products add vectors. ``unread`` weights of a layer are known by
    their number alone.

    With ``encoder_layers``, so many layers come first and read a text of their own, of ``across`` tokens; the others
    attend to what these made of it, by four more matrices.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    kv_heads: int = 0
    ffn: int = 0
    gated: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    flash: bool = False
    tied: bool = True
    head: int = 0
    dense_layers: tuple[int, ...] = ()
    shared_ffn: int = 0
    shared_gate: bool = False
    latent: Latent | None = None
    predictors: int = 0
    positions: int = 0
    head_extra: int = 0
    pooled: int = 0
    logits: bool = True
    loss_chunks: int = 1
    rotary: bool = False
    dropout: bool = True
    keeps_gate: bool = False
    biased: bool = True
    unread: float = 0.0
    encoder_layers: int = 0
    across: int = 0

    @cached_property
    def kinds(self) -> tuple[tuple[float, Model], ...]:
        """The kinds of layers, each as a model that has no other, with its share of the layers."""
        if self.encoder_layers:
            reading = self.encoder_layers / self.layers
            encoder = replace(self, encoder_layers=0, across=0, sequence=self.across)
            return (reading, encoder), (1 - reading, replace(self, encoder_layers=0))
        if not (self.experts and self.dense_layers):
            return ((1.0, self),)
        dense = len(self.dense_layers) / self.layers
        plain = replace(self, dense_layers=(), experts=0, top_k=0, shared_ffn=0, shared_gate=False)
        return tuple(pair for pair in ((1 - dense, replace(self, dense_layers=())), (dense, plain)) if pair[0])

    def part(self, layers: Iterable[int]) -> Model:
        """The model with these layers alone, numbered anew; what they are on average is what all layers are."""
        if not self.several_kinds:
            return self
        indices = list(layers)
        if self.encoder_layers and indices:
            first = sum(index < self.encoder_layers for index in indices)
            kinds = [kind for _, kind in self.kinds]
            if first in (0, len(indices)):
                return replace(kinds[0] if first else kinds[1], layers=len(indices))
            return replace(self, layers=len(indices), encoder_layers=first)
        if not indices:
            return self
        dense = [index for index, layer in enumerate(indices) if layer in self.dense_layers]
        return replace(self, layers=len(indices), dense_layers=tuple(dense))

    def kind_of(self, layer: int) -> Model:
        """The kind of one layer, as a model that has no other."""
        return self.part((layer,)).kinds[0][1]

    @property
    def several_kinds(self) -> bool:
        """Whether its layers differ."""
        return bool(self.dense_layers or self.encoder_layers)

    @property
    def tokens(self) -> int:
        """Tokens of a sample that are embedded, and travel between stages."""
        return self.sequence + (self.across if self.encoder_layers else 0)

    def split_over(self, tensor: int) -> None:
        """Raise :class:`InputError` unless all splits over ``tensor`` ranks, as layers do when they are built."""
        even_part(self.heads, tensor, "attention heads (model.num_heads)")
        even_part(self.kv_heads or self.heads, tensor, "key-value heads (model.num_kv_heads)")
        for _, kind in self.kinds:
            key = "experts.ffn_size" if kind.experts and kind.expert_ffn else "ffn_size"
            even_part(kind.ffn_width, tensor, f"features of the feed-forward layer (model.{key})")
            even_part(kind.shared_ffn, tensor, "features of the shared expert (model.experts.shared.ffn_size)")

    @property
    def head_size(self) -> float:
        """Width of a head; of latent attention the mean of keys' and values', as its products take them."""
        if self.latent:
            return (self.latent.rotating + self.latent.plain + self.latent.value) / 2
        return self.head or self.hidden / self.heads

    @property
    def context_width(self) -> float:
        """Width of what all heads give to the output projection."""
        return self.heads * (self.latent.value if self.latent else self.head_size)

    def plain(self, *, fused: bool) -> bool:
        """Whether its layers are those of GPT-2, at which layers were measured; ``fused``: without stored scores."""
        return (
            not (self.gated or self.experts or self.latent or self.across or self.kv_heads not in (0, self.heads))
            and self.flash == fused
        )

    @property
    def qkv_width(self) -> float:
        """Columns of the projection to queries, keys and values; of others as many as have the same weights."""
        if self.latent:
            return self._latent_parameters / self.hidden + self.unread / self.hidden
        return (self.heads + 2 * (self.kv_heads or self.heads)) * self.head_size + self.unread / self.hidden

    @property
    def _latent_parameters(self) -> float:
        """Weights of latent attention before the output projection."""
        assert self.latent is not None, "asked for latent attention alone"
        keys, queries, rotating, plain, value = self.latent
        size, hidden = self.heads * (rotating + plain), self.hidden
        query = queries * (hidden + size) if queries else hidden * size
        return query + hidden * (keys + rotating) + keys * self.heads * (plain + value)

    @property
    def ffn_width(self) -> int:
        """Width of one feed-forward layer, an expert's included."""
        return (self.experts and self.expert_ffn) or self.ffn or 4 * self.hidden

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward layer."""
        return 3 if self.gated else 2

    @cached_property
    def attention_parameters(self) -> float:
        """Weights of a layer's attention, without biases and norms."""
        return self.hidden * (self.qkv_width + self.context_width + (4 * self.context_width if self.across else 0))

    @cached_property
    def expert_parameters(self) -> float:
        """Weights of a layer's experts, which expert-parallel ranks share out; the mean over its kinds of layers."""
        return sum(share * kind.experts * kind.matrices * kind.hidden * kind.ffn_width for share, kind in self.kinds)

    @cached_property
    def dense_parameters(self) -> float:
        """Weights of a layer that every expert-parallel rank holds; the mean over its kinds of layers."""
        return sum(share * (kind.attention_parameters + kind._common_parameters) for share, kind in self.kinds)

    @property
    def _common_parameters(self) -> float:
        """Of a layer of one kind, the weights of its feed-forward part without experts; routers count here."""
        if not self.experts:
            return self.matrices * self.hidden * self.ffn_width
        return self.hidden * (self.matrices * self.shared_ffn + self.experts + self.shared_gate)

    @property
    def _met_parameters(self) -> float:
        """Weights of a layer active for a token; the mean over its kinds of layers."""
        return self.dense_parameters + sum(
            share * kind.expert_parameters * kind.top_k / kind.experts for share, kind in self.kinds if kind.experts
        )

    @cached_property
    def predictor(self) -> Model:
        """The block of a predictor of a further token, as a model whose layers are of the last one's kind."""
        dense = self.layers - 1 in self.dense_layers
        return self.kinds[-1][1] if dense else replace(self, dense_layers=())

    @property
    def predictor_join(self) -> int:
        """Weights with which a predictor joins two vectors."""
        return 2 * self.hidden**2

    def rows_of_words(self, tensor: int) -> int:
        """Rows of embedding and head over ``tensor`` ranks, padded as layers are built: a multiple of 128 on each."""
        return -(-self.vocabulary // (_ROWS * tensor)) * _ROWS * tensor

    def tables(self, tensor: int, *, first: bool, last: bool) -> float:
        """Weights of embedding and head on one of ``tensor`` ranks of a stage that is the first, the last or both.

        Rows of words are padded and split; each rank has all learned positions.
        """
        words = (
            self.rows_of_words(tensor) * self.hidden / tensor * (1 if first and last and self.tied else first + last)
        )
        return words + first * self.positions * self.hidden

    @property
    def parameters(self) -> float:
        """Weights of the model, without biases and norms."""
        tables = (
            (self.vocabulary * (1 if self.tied else 2) + self.positions) * self.hidden + self.head_extra + self.pooled
        )
        layers = self.layers * (self.dense_parameters + self.expert_parameters)
        block = self.predictor.dense_parameters + self.predictor.expert_parameters
        return layers + tables + self.predictors * (block + self.predictor_join)

    @cached_property
    def flops_per_token(self) -> float:
        """Floating-point operations of forward and backward for one token, without recomputation.

        6 per weight active for it, and 12 s h a layer for all scores (Narayanan et al. 2021, appendix).
        """
        if self.encoder_layers:
            return self._flops_of_both_texts
        met = self._met_parameters
        scores = 12 * self.sequence * self.heads * self.head_size
        head = 6 * self.hidden * self.vocabulary
        predicted = self.predictors * (6 * (self.predictor._met_parameters + self.predictor_join) + scores + head)
        return self.layers * (6 * met + scores) + predicted + 6 * self.head_extra + (head if self.logits else 0.0)

    @property
    def _flops_of_both_texts(self) -> float:
        """With an encoder: those of a sample over its decoder's tokens. Keys and values of it are the encoder's."""
        (_, encoder), (_, decoder) = self.kinds
        ratio = self.across / self.sequence
        reading = 6 * encoder.dense_parameters + 12 * self.across * self.context_width
        elsewhere = 2 * (1 - ratio) * self.hidden * self.context_width
        writing = 6 * (decoder.dense_parameters - elsewhere) + 12 * (self.sequence + self.across) * self.context_width
        head = 6 * self.hidden * self.vocabulary
        return self.encoder_layers * ratio * reading + (self.layers - self.encoder_layers) * writing + head


@dataclass(frozen=True)
class Split:
    """How a model is split and batched; the names are those of the sections ``parallel`` and ``train``.

    ``scatter_messages``: each tensor rank sends its part of what goes to the next stage. ``overlap``: gradients are
    reduced while other backwards still run. ``gradient_bytes``: of a gradient when it is reduced.
    """

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    data: int = 1
    expert: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    scatter_messages: bool = False
    zero1: bool = False
    overlap: bool = False
    gradient_bytes: int = 2

    @property
    def ranks(self) -> int:
        """Devices of the run."""
        return self.tensor * self.pipeline * self.data

    @property
    def microbatches(self) -> int:
        """Microbatches that one copy of the model runs in a step."""
        return self.global_batch // (self.micro_batch * self.data)
