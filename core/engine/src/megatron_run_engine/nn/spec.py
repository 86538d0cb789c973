"""Sizes and choices from which transformer layers are built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from megatron_run.contracts import Init, NormKind
from megatron_run.contracts.costs import AttentionCosts, Divided, FeedForwardCosts, LayerCosts, ModelCosts
from megatron_run.errors.wording import nearest_divisors, nearest_multiples

if TYPE_CHECKING:
    from collections.abc import Iterator

Scores = Literal["softmax", "sigmoid"]
DropPolicy = Literal["probs", "position"]
Dispatch = Literal["alltoall", "allgather"]


@dataclass(frozen=True)
class ExpertSpec:
    """``count`` experts of ``ffn`` features in each of ``layers``, of which ``top_k`` process a token.

    ``scores`` and ``pre_softmax`` set how the router turns logits into weights, ``normalised`` whether sigmoids of
    several chosen experts are divided by their sum; ``scaling`` multiplies the weights of the chosen experts. With
    ``groups`` above 1 a token chooses among the experts of the ``top_groups`` best groups, which are neighbouring
    experts of equal number; a group is worth the sum of its ``group_best`` best scores. ``balance`` and ``z`` are the
    coefficients of the auxiliary losses, ``bias_rate`` the step of the biases that balance without one. An expert
    accepts at most ``capacity_factor`` times its even share of a microbatch's tokens, or all of them if it is None;
    ``drop`` selects which tokens are dropped: those with the smallest weight, or the last. With ``pad`` each expert
    computes as many rows as it may accept, so that no shape follows the routing. A shared expert of ``shared_ffn``
    features, if above 0, processes every token; ``shared_gate`` weighs its output.
    """

    count: int
    top_k: int
    ffn: int
    layers: frozenset[int]
    scores: Scores = "softmax"
    pre_softmax: bool = False
    normalised: bool = True
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    bias_rate: float = 0.0
    balance: float = 0.01
    z: float = 0.0
    capacity_factor: float | None = None
    drop: DropPolicy = "probs"
    pad: bool = False
    shared_ffn: int = 0
    shared_gate: bool = False
    dispatch: Dispatch = "alltoall"

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names, as reported, of the auxiliary losses with a coefficient above 0."""
        return ("model/balance_loss",) * (self.balance > 0) + ("model/z_loss",) * (self.z > 0)

    def capacity(self, tokens: int) -> int:
        """The most of a microbatch's ``tokens`` that one expert accepts: its even share times the factor, rounded up.

        Fedus et al. 2021, "Switch Transformers", equation 3.
        """
        assert self.capacity_factor is not None, "without a factor, capacity is unlimited"
        return math.ceil(tokens * self.top_k / self.count * self.capacity_factor)


Position = Literal["learned", "rope"]
#: Of a half's norms: before it, on what it adds to the stream, both, or on the sum.
NormPlacement = Literal["pre", "post", "sandwich", "sum"]
QkNorm = Literal["none", "head", "full"]
Activation = Literal["gelu", "gelu_tanh", "relu_squared", "swiglu", "geglu", "geglu_tanh"]
#: Activations that multiply a second product: their input layer has a gate.
GATED = frozenset({"swiglu", "geglu", "geglu_tanh"})
RopeScalingKind = Literal["linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotation frequencies change for sequences ``factor`` times as long as the ``original`` ones.

    Below ``low`` turns over the original length a pair of features turns ``factor`` times slower, above ``high`` turns
    as before, and between them by a ramp (:mod:`megatron_run_engine.nn.rotary`). ``attention_factor`` multiplies
    queries and keys. ``short`` and ``long`` are for longrope how many times slower each pair turns, in texts up to the
    original length and in longer ones.
    """

    kind: RopeScalingKind
    factor: float
    original: int
    low: float
    high: float
    attention_factor: float = 1.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    def switch(self, longest: int) -> int | None:
        """The longest text that has other angles than texts of ``longest`` tokens; None if there is none."""
        return self.original if self.kind == "longrope" and longest > self.original else None


def check_heads(hidden: int, heads: int, otherwise: str = "") -> None:
    """Raise ValueError unless ``heads`` divide ``hidden``, with the nearest numbers and what to do ``otherwise``."""
    if hidden % heads:
        raise ValueError(
            f"hidden_size {hidden} does not divide over {heads} heads: {hidden} / {heads} = {hidden / heads:g}; "
            f"set num_heads to {nearest_divisors(hidden, heads)}, "
            f"or hidden_size to {nearest_multiples(hidden, heads)}{otherwise}"
        )


@dataclass(frozen=True)
class TransformerSpec:
    """A decoder: GPT-2 by default (Radford et al. 2019), with the options of later models.

    ``sequence_length`` is the longest sequence; ``vocab`` is unpadded. ``dropout`` acts on the embedding, on the
    attention probabilities and on what each half of a block adds to the residual stream; ``label_smoothing`` acts on
    the training loss, which makes its logits in ``loss_chunks`` pieces. The layers listed in ``experts`` have experts
    instead of one feed-forward network. Without ``causal`` a token sees those after it as well.

    A head has ``head_features``, by default hidden / heads, of which the first ``rotated_features`` rotate in the
    layers of ``rotated_layers``. Queries in ``window_layers`` see the last ``window`` tokens, themselves included, and
    rotate by ``window_rope_theta``, unscaled, where it is given. ``scale`` multiplies the products of query and key,
    by default 1/sqrt(head size). A soft-cap c makes c * tanh(x / c) of x.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence_length: int
    head_features: int | None = None
    position: Position = "learned"
    rope_theta: float = 10000.0
    rope_fraction: float = 1.0
    rope_scaling: RopeScaling | None = None
    rotated_layers: frozenset[int] | None = None
    window: int | None = None
    window_layers: frozenset[int] = frozenset()
    window_rope_theta: float | None = None
    qk_norm: QkNorm = "none"
    scale: float | None = None
    softcap: float | None = None
    norm: NormKind = "layernorm"
    norm_eps: float = 1e-5
    norm_placement: NormPlacement = "pre"
    activation: Activation = "gelu"
    bias: bool = True
    qkv_bias: bool | None = None
    parallel_residual: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    dropout: float = 0.1
    init_std: float = 0.02
    label_smoothing: float = 0.0
    loss_chunks: int = 1
    experts: ExpertSpec | None = None
    causal: bool = True

    @property
    def head_size(self) -> int:
        """Features of one attention head."""
        return self.head_features or self.hidden // self.heads

    @property
    def norms_first(self) -> bool:
        """Whether a half of a block begins with a norm."""
        return self.norm_placement in ("pre", "sandwich")

    @property
    def rotated_features(self) -> int:
        """Features of a head that rotate: an even number."""
        return int(self.head_size * self.rope_fraction) // 2 * 2

    def rotates(self, layer: int) -> bool:
        """Whether queries and keys of ``layer`` rotate."""
        return self.position == "rope" and (self.rotated_layers is None or layer in self.rotated_layers)

    def window_of(self, layer: int) -> int | None:
        """How many tokens a query of ``layer`` sees; None for all."""
        return self.window if layer in self.window_layers else None

    @property
    def init(self) -> Init:
        """Initial values of matrices."""
        return Init("normal", self.init_std)

    @property
    def residual_init(self) -> Init:
        """Initial values of matrices that add to the residual stream, scaled by 1/sqrt(2L): the stream sums 2L."""
        return Init("normal", self.init_std / math.sqrt(2 * self.layers))

    def costs(self, *, tied: bool, attention: AttentionCosts | None = None) -> ModelCosts:
        """The costs of this network, ``tied`` to its embedding, where ``attention`` may be another than its own."""
        experts = self.experts
        matrices, gate = 3 if self.activation in GATED else 2, self.activation.startswith("geglu")
        dense = mixed = FeedForwardCosts(self.ffn, matrices, gate)
        if experts is not None:
            shared, shared_gate = experts.shared_ffn, experts.shared_gate and experts.shared_ffn > 0
            mixed = FeedForwardCosts(experts.ffn, matrices, gate, experts.count, experts.top_k, shared, shared_gate)

        @cache  # one object a kind: there may be 100,000 layers
        def kind(rotary: bool, has_experts: bool) -> LayerCosts:
            own = attention or AttentionCosts.plain(self.heads, self.head_size, self.kv_heads, rotary=rotary)
            feed = mixed if has_experts else dense
            return LayerCosts(self.hidden, self.sequence_length, (own, feed), self.dropout > 0, self.bias)

        with_experts = experts.layers if experts is not None else frozenset()
        return ModelCosts(
            tuple(kind(self.rotates(index), index in with_experts) for index in range(self.layers)),
            self.vocab,
            tied=tied,
            positions=self.sequence_length if self.position == "learned" else 0,
            vectors=self.vectors(),
            loss_chunks=self.loss_chunks,
            divided=tuple(self._divided()),
            approximations=tuple(self._approximations()),
        )

    def vectors(self) -> int:
        """Values of all biases and norms."""
        mixed = len(self.experts.layers) if self.experts is not None else 0
        plain = (self.layers - mixed) * self.layer_vectors(mixed=False)
        return plain + mixed * self.layer_vectors(mixed=True) + self.norm_values

    def layer_vectors(self, *, mixed: bool) -> int:
        """Those of a layer, ``mixed``: with experts."""
        dense = self.norm_values * self.norms_first + self._feed_biases(self.ffn)
        return self._attention_vectors() + (self._expert_vectors() if mixed else dense)

    @property
    def norm_values(self) -> int:
        """Values of a norm of the stream."""
        return self.hidden * self._norm_parts

    @property
    def _norm_parts(self) -> int:
        return 2 if self.norm.startswith("layernorm") else 1

    def _attention_vectors(self) -> int:
        """Those of a layer but for its feed-forward part: its norms after the halves too."""
        queries, others = self.heads * self.head_size, 2 * self.kv_heads * self.head_size
        biased = self.bias if self.qkv_bias is None else self.qkv_bias
        of_heads = {"none": 0, "head": 2 * self.head_size * self._norm_parts, "full": queries + others // 2}
        norms = self.norm_values * (self.norms_first + 2 * (self.norm_placement != "pre"))
        return norms + of_heads[self.qk_norm] + biased * (queries + others) + self.bias * self.hidden

    def _feed_biases(self, ffn: int) -> int:
        return self.bias * (ffn * (2 if self.activation in GATED else 1) + self.hidden)

    def _expert_vectors(self) -> int:
        """Those of a feed-forward part with experts, its norm included."""
        experts = self.experts
        if experts is None:
            return 0
        shared = self._feed_biases(experts.shared_ffn) if experts.shared_ffn else 0
        balanced = experts.count * (experts.bias_rate > 0)
        return self.norm_values + experts.count * self._feed_biases(experts.ffn) + shared + balanced

    def _divided(self) -> Iterator[Divided]:
        yield Divided(self.heads, "attention heads (model.num_heads)")
        yield Divided(self.kv_heads, "key-value heads (model.num_kv_heads)")
        experts = self.experts
        if experts is None or len(experts.layers) < self.layers:
            yield Divided(self.ffn, "features of the feed-forward layer (model.ffn_size)")
        if experts is not None:
            yield Divided(experts.ffn, "features of the feed-forward layer (model.experts.ffn_size)")
            yield Divided(experts.shared_ffn, "features of the shared expert (model.experts.shared.ffn_size)")

    def _approximations(self) -> Iterator[str]:
        if self.experts is not None:
            yield "evenly loaded experts because no routing is known"
            if self.experts.capacity_factor is not None:
                yield "experts without a capacity because drops follow the routing"
        if self.window_layers:
            yield "full attention because windows are not timed"
