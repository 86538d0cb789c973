"""The specification of a transformer: its sizes and choices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron_run.contracts import Init

Scores = Literal["softmax", "sigmoid"]
DropPolicy = Literal["probs", "position"]
Dispatch = Literal["alltoall", "allgather"]


@dataclass(frozen=True)
class ExpertSpec:
    """``count`` experts of ``ffn`` features in each of ``layers``, ``top_k`` of them active per token.

    ``scores`` and ``pre_softmax`` define the router's scores, and ``scaling`` multiplies the weights of chosen experts.
    ``balance`` and ``z`` are the coefficients of the auxiliary losses. An expert takes at most ``capacity_factor``
    times its even share of a microbatch's tokens, or all if that is None; ``drop`` selects the tokens to drop. If
    ``shared_ffn`` is above 0, a shared expert of that many features processes every token, weighted by a gate with
    ``shared_gate``.
    """

    count: int
    top_k: int
    ffn: int
    layers: frozenset[int]
    scores: Scores = "softmax"
    pre_softmax: bool = False
    scaling: float = 1.0
    balance: float = 0.01
    z: float = 0.0
    capacity_factor: float | None = None
    drop: DropPolicy = "probs"
    shared_ffn: int = 0
    shared_gate: bool = False
    dispatch: Dispatch = "alltoall"

    @property
    def ffn_features(self) -> int:
        """The features of all feed-forward networks that are active for one token."""
        return self.top_k * self.ffn + self.shared_ffn

    @property
    def loss_names(self) -> tuple[str, ...]:
        """The names of the auxiliary losses in use, under which they are reported."""
        return ("model/balance_loss",) * (self.balance > 0) + ("model/z_loss",) * (self.z > 0)

    def capacity(self, tokens: int) -> int:
        """Return how many of a microbatch's ``tokens`` one expert takes: its even share times the factor, rounded up.

        Fedus et al. 2021, "Switch Transformers", equation 3.
        """
        assert self.capacity_factor is not None, "capacity is unlimited"
        return math.ceil(tokens * self.top_k / self.count * self.capacity_factor)


Position = Literal["learned", "rope"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "swiglu"]


@dataclass(frozen=True)
class TransformerSpec:
    """One decoder: GPT-2 by default (Radford et al. 2019), with the options of later models.

    ``sequence_length`` is the longest sequence, and ``vocab`` is unpadded. ``dropout`` acts on the embedding, on the
    attention probabilities and on the output of each half of a block; ``label_smoothing`` on the training loss. The
    layers in ``experts.layers`` have experts instead of one feed-forward network.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence_length: int
    position: Position = "learned"
    rope_theta: float = 10000.0
    norm: Norm = "layernorm"
    norm_eps: float = 1e-5
    activation: Activation = "gelu"
    bias: bool = True
    dropout: float = 0.1
    init_std: float = 0.02
    label_smoothing: float = 0.0
    experts: ExpertSpec | None = None

    @property
    def head_size(self) -> int:
        """The features of one attention head."""
        return self.hidden // self.heads

    @property
    def init(self) -> Init:
        """The initialisation of matrices."""
        return Init("normal", self.init_std)

    @property
    def residual_init(self) -> Init:
        """The initialisation of matrices that add to the residual stream: it sums 2L of them, so each is 1/sqrt(2L)."""
        return Init("normal", self.init_std / math.sqrt(2 * self.layers))

    @property
    def matmul_parameters(self) -> int:
        """The values of all matrices that are active for a token: blocks and output layer, without the embedding.

        Of a layer of experts these are the chosen experts and the router.
        """
        attention = self.head_size * (2 * self.heads + 2 * self.kv_heads)
        features, others = self.ffn * self.layers, 0
        if self.experts is not None:
            mixed = len(self.experts.layers)
            features += mixed * (self.experts.ffn_features - self.ffn)
            others = mixed * (self.experts.count + self.experts.shared_gate)
        mlps = features * (3 if self.activation == "swiglu" else 2)
        return self.hidden * (self.layers * attention + mlps + others + self.vocab)

    @property
    def flops_per_token(self) -> float:
        """The floating-point operations of one token, forward and backward, at the full sequence length.

        ``6 N + 12 L s n d``: two operations a parameter and three passes over each matrix (one forward, two backward).
        The two s x s products of attention count in full, as without a mask (Chowdhery et al. 2022, PaLM, appendix B).
        ``N`` includes the output layer but not the embedding.
        """
        attention = self.layers * self.sequence_length * self.heads * self.head_size
        return 6.0 * self.matmul_parameters + 12.0 * attention
