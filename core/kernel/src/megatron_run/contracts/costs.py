"""The costs of a model, as its options tell them: weights, FLOPs and saved values of each layer, by segment.

Training reads FLOPs from them (for MFU), the planner times and memory. A model's options have one method for it::

    def costs(self, sequence_length: int, vocab_size: int) -> ModelCosts: ...

Whatever fits no other description is a :class:`SegmentCosts`: its matrices, and what its kernels keep and move. The
suite of models compares weights and saved values with those of the layers that are built. Biases and norms cost nothing
here; a model may tell how many values they have.

Legend: ``s`` tokens of a sample, ``h`` hidden, ``t`` tensor-parallel size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class AttentionCosts:
    """Attention of ``heads`` over the layer's own tokens, or over ``across`` tokens of another text.

    The projection to queries, keys and values has as many weights as one of ``columns`` columns, and what all heads
    give to the output projection is ``context`` wide. ``head_size`` is the width of a head's products with keys and
    values, on average. ``rotary``: rotated queries and keys are kept beside the projection's. ``flash``: scores are
    never stored.
    """

    heads: int
    head_size: float
    columns: float
    context: float
    kv_heads: int
    across: int = 0
    rotary: bool = False
    flash: bool = True

    @classmethod
    def plain(cls, heads: int, head_size: float, kv_heads: int = 0, **more: bool) -> AttentionCosts:
        """Attention whose queries, keys and values all have heads of ``head_size``; 0 ``kv_heads`` are ``heads``."""
        groups = kv_heads or heads
        return cls(heads, head_size, (heads + 2 * groups) * head_size, heads * head_size, groups, **more)

    @classmethod
    def over(cls, across: int, heads: int, head_size: float) -> AttentionCosts:
        """Attention over ``across`` tokens of another text, from which keys and values are made."""
        return cls(heads, head_size, 3 * heads * head_size, heads * head_size, heads, across)

    def weights(self, hidden: int) -> float:
        """Weights of its matrices."""
        return hidden * (self.columns + self.context)

    def flops(self, hidden: int, tokens: int) -> float:
        """FLOPs of a sample's forward and backward: 6 a weight and token, and 12 a feature and pair of tokens."""
        made = self.columns + self.context
        if not self.across:
            return 6 * hidden * made * tokens + 12 * tokens**2 * self.heads * self.head_size
        own = 2 * self.context  # queries and output are of the layer's tokens, keys and values of the others
        products = own * tokens + (made - own) * self.across
        return 6 * hidden * products + 12 * tokens * self.across * self.heads * self.head_size

    def saved(self, hidden: int, tokens: int) -> float:
        """Values of a sample that stay until the backward, beside the norm's and stored scores; ranks split them."""
        if self.across:
            return 2 * (tokens + self.across) * self.context
        rotated = self.columns - self.kv_heads * self.head_size if self.rotary else 0.0
        return tokens * (self.columns + self.context + rotated)


@dataclass(frozen=True)
class FeedForwardCosts:
    """A feed-forward half of ``features``, or ``experts`` of them of which ``top_k`` process a token.

    ``matrices`` are 3 with a gate, whose activation is kept if ``keeps_gate``. A shared expert of ``shared`` features
    processes every token, with a gate of its own if ``shared_gate``.
    """

    features: int
    matrices: int = 2
    keeps_gate: bool = False
    experts: int = 0
    top_k: int = 0
    shared: int = 0
    shared_gate: bool = False

    @property
    def routed(self) -> int:
        """Rows that it processes for each token."""
        return max(1, self.top_k) if self.experts else 1

    def weights(self, hidden: int) -> float:
        """Weights that every expert-parallel rank holds; routers count here."""
        if not self.experts:
            return self.matrices * hidden * self.features
        return hidden * (self.matrices * self.shared + self.experts + self.shared_gate)

    def expert_weights(self, hidden: int) -> float:
        """Weights of its experts, which expert-parallel ranks share out."""
        return self.experts * self.matrices * hidden * self.features

    def flops(self, hidden: int, tokens: int) -> float:
        """FLOPs of a sample's forward and backward: 6 for each weight that processes a token."""
        chosen = self.expert_weights(hidden) * self.top_k / self.experts if self.experts else 0.0
        return 6 * tokens * (self.weights(hidden) + chosen)

    def saved(self, hidden: int, tokens: int) -> float:
        """Values of a sample that stay until the backward: what the activation reads and writes; ranks split them."""
        inside = self.routed * self.features * (self.matrices + self.keeps_gate)
        return float(tokens * (inside + self.shared * self.matrices * (self.experts > 0)))

    def copied(self, hidden: int, tokens: int) -> float:
        """Values of a sample that stay besides, whole on every tensor-parallel rank: what experts get and give."""
        return float(2 * tokens * self.routed * hidden) if self.experts else 0.0


@dataclass(frozen=True)
class SegmentCosts:
    """Any other part of a layer that reads a normed stream and adds to it: a scan, a convolution, a gate.

    ``products`` are matrices as (inputs, outputs) that multiply every token, which tensor-parallel ranks split;
    ``operations`` are FLOPs of a token's forward beside them. ``kept`` values of a token stay until the backward beside
    the norm's, and the ``kernels`` of a forward read and write ``moved`` values of a token beside products. Values have
    two bytes; compare the activations of ``plan --as-is`` with those of ``--dry-run`` for the same ``parallel`` keys.
    """

    name: str
    products: tuple[tuple[int, int], ...]
    kept: float
    moved: float = 0.0
    kernels: int = 1
    operations: float = 0.0

    def __post_init__(self) -> None:
        if min(self.kept, self.moved, self.kernels, self.operations) < 0 or (self.moved and not self.kernels):
            raise ValueError(f"segment {self.name!r} has a cost below 0, or moves values without kernels")

    def weights(self, hidden: int) -> float:
        """Weights of its matrices, whatever ``hidden``."""
        return float(sum(inputs * outputs for inputs, outputs in self.products))

    def flops(self, hidden: int, tokens: int) -> float:
        """FLOPs of a sample's forward and backward: twice the forward's in the backward."""
        return tokens * (6 * self.weights(hidden) + 3 * self.operations)

    def saved(self, hidden: int, tokens: int) -> float:
        """Values of a sample that stay until the backward, beside the norm's; ranks split them."""
        return tokens * self.kept


Part = AttentionCosts | FeedForwardCosts | SegmentCosts


@dataclass(frozen=True)
class LayerCosts:
    """A layer: ``parts`` that each read the normed stream of ``hidden`` features and add to it.

    A sample has ``tokens`` in it. With ``dropout`` masks are kept, and ``biased`` products add vectors.
    """

    hidden: int
    tokens: int
    parts: tuple[Part, ...]
    dropout: bool = True
    biased: bool = True

    @cached_property
    def weights(self) -> float:
        """Weights that every expert-parallel rank holds."""
        return sum(part.weights(self.hidden) for part in self.parts)

    @cached_property
    def expert_weights(self) -> float:
        """Weights of experts, which expert-parallel ranks share out."""
        return sum(part.expert_weights(self.hidden) for part in self.feeds)

    @cached_property
    def flops(self) -> float:
        """FLOPs of a sample's forward and backward, without recomputation."""
        return sum(part.flops(self.hidden, self.tokens) for part in self.parts)

    @cached_property
    def saved(self) -> float:
        """Values of a sample that one rank keeps until the backward, without scores, and without masks of dropout.

        Of each part they are the inputs of its norm and of its products, and what it keeps itself.
        """
        inputs = 2 * len(self.parts) * self.hidden * self.tokens
        inside = sum(part.saved(self.hidden, self.tokens) for part in self.parts)
        return inputs + inside + sum(part.copied(self.hidden, self.tokens) for part in self.feeds)

    @property
    def attentions(self) -> tuple[AttentionCosts, ...]:
        """Its parts that attend."""
        return tuple(part for part in self.parts if isinstance(part, AttentionCosts))

    @property
    def feeds(self) -> tuple[FeedForwardCosts, ...]:
        """Its feed-forward parts."""
        return tuple(part for part in self.parts if isinstance(part, FeedForwardCosts))

    @property
    def experts(self) -> int:
        """Experts of the layer, 0 without any."""
        return max((part.experts for part in self.feeds), default=0)


@dataclass(frozen=True)
class LayerKinds:
    """Layers by kind: the number of each. It is no whole one for a stage of average size."""

    counts: tuple[tuple[float, LayerCosts], ...] = ()

    @property
    def total(self) -> float:
        """How many layers there are."""
        return sum(count for count, _ in self.counts)

    @property
    def layers(self) -> tuple[LayerCosts, ...]:
        """One layer of each kind."""
        return tuple(layer for _, layer in self.counts)

    def sum(self, cost: Callable[[LayerCosts], float]) -> float:
        """``cost`` over all layers."""
        return sum((count * cost(layer) for count, layer in self.counts), 0.0)

    def mean(self, cost: Callable[[LayerCosts], float]) -> float:
        """``cost`` of a layer on average, 0 without any."""
        return self.sum(cost) / self.total if self.counts else 0.0

    @property
    def weights(self) -> float:
        """Weights that every expert-parallel rank holds."""
        return self.sum(lambda layer: layer.weights)

    @property
    def expert_weights(self) -> float:
        """Weights of experts, which expert-parallel ranks share out."""
        return self.sum(lambda layer: layer.expert_weights)

    @property
    def flops(self) -> float:
        """FLOPs of a sample's forward and backward, without recomputation."""
        return self.sum(lambda layer: layer.flops)

    def over(self, stages: int) -> LayerKinds:
        """Those of one of ``stages``, on average."""
        return LayerKinds(tuple((count / stages, layer) for count, layer in self.counts))


@dataclass(frozen=True)
class Divided:
    """A ``count`` of ``what`` that tensor-parallel ranks share out evenly, with the key that sets it."""

    count: int
    what: str


@dataclass(frozen=True)
class ModelCosts:
    """A model: its ``layers`` in order, and what is before and behind them.

    Words of ``vocabulary`` are embedded, as are ``positions`` other learned vectors; the head's product with the words
    shares the embedding's matrix if ``tied``, is none without ``logits``, and is made in ``loss_chunks`` parts. The
    head has ``head_weights`` besides, and ``other_weights`` that no product with tokens has; biases, norms and small
    tables have ``vectors`` values, 0 where nobody tells. ``predictors`` of further tokens follow the last layer: each a
    layer like that, a matrix that joins two vectors, and the head's product.
    ``embedded`` counts the tokens of a sample that are embedded and travel between stages (0: the last layer's).
    ``divided`` is what tensor-parallel ranks share out. ``computes_pieces`` is what the model's class says of itself.
    ``approximations`` say, for a user, what is told as something else, and why.
    """

    layers: tuple[LayerCosts, ...]
    vocabulary: int
    tied: bool = True
    positions: int = 0
    head_weights: float = 0.0
    other_weights: float = 0.0
    vectors: float = 0.0
    logits: bool = True
    loss_chunks: int = 1
    predictors: int = 0
    embedded: int = 0
    divided: tuple[Divided, ...] = ()
    computes_pieces: bool = False
    approximations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a model has a layer at least")

    @property
    def hidden(self) -> int:
        """Features of the stream."""
        return self.layers[-1].hidden

    @property
    def sequence(self) -> int:
        """Tokens of a sample of which each has a loss: those of the last layer."""
        return self.layers[-1].tokens

    @property
    def tokens(self) -> int:
        """Tokens of a sample that are embedded, and travel between stages."""
        return self.embedded or self.sequence

    @cached_property
    def _indices(self) -> Mapping[LayerCosts, Sequence[int]]:
        """The indices of each kind of layer, in order."""
        found: dict[LayerCosts, list[int]] = {}
        known: dict[int, list[int]] = {}  # by identity: most layers are one object, and a hash visits all its parts
        for index, layer in enumerate(self.layers):
            if id(layer) not in known:
                known[id(layer)] = found.setdefault(layer, [])
            known[id(layer)].append(index)
        return found

    @cached_property
    def kinds(self) -> LayerKinds:
        """All layers by kind."""
        return self.part(range(len(self.layers)))

    def part(self, *places: range) -> LayerKinds:
        """The layers with the indices of ``places``, by kind. It takes as long for 10 layers as for 100,000."""

        def count(indices: Sequence[int]) -> int:
            return sum(bisect_left(indices, place.stop) - bisect_left(indices, place.start) for place in places)

        held = ((count(indices), layer) for layer, indices in self._indices.items())
        return LayerKinds(tuple((number, layer) for number, layer in held if number))

    @property
    def experts(self) -> int:
        """Experts of a layer that has some."""
        return max(layer.experts for layer in self.kinds.layers)

    @property
    def predictor_weights(self) -> float:
        """Weights of a predictor that every expert-parallel rank holds."""
        return self.layers[-1].weights + 2 * self.hidden**2

    @property
    def parameters(self) -> float:
        """Parameters of the model, as a run counts them where its ``vectors`` are told."""
        return self.weights + self.vectors

    @property
    def weights(self) -> float:
        """Weights of the model, without biases and norms."""
        words = self.vocabulary * (1 if self.tied else 2) + self.positions
        tables = words * self.hidden + self.head_weights + self.other_weights
        layers = self.kinds.weights + self.kinds.expert_weights
        return layers + tables + self.predictors * (self.predictor_weights + self.layers[-1].expert_weights)

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs of a sample's forward and backward over the tokens of the last layer, without recomputation.

        6 a weight that processes a token, and 12 s h a layer for all scores, as if nothing were masked (Narayanan et
        al. 2021, appendix; Chowdhery et al. 2022, PaLM, appendix B).
        """
        layers = self.kinds.flops / self.sequence
        head = 6.0 * self.hidden * self.vocabulary
        predictor = self.layers[-1].flops / self.sequence + 12.0 * self.hidden**2 + head
        return layers + self.predictors * predictor + 6 * self.head_weights + (head if self.logits else 0.0)
