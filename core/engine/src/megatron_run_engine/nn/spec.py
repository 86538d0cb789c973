"""The sizes and choices from which transformer pieces are built."""

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
    """``count`` feed-forward networks of ``ffn`` features in each of ``layers``, of which a token meets ``top_k``.

    ``scores`` and ``pre_softmax`` say what a router makes of its logits, ``scaling`` multiplies the weights of the
    chosen. ``balance`` and ``z`` are the coefficients of the auxiliary losses. An expert takes ``capacity_factor``
    times its even share of a microbatch's tokens, all where it is None; ``drop`` says whose are left out. Every token
    also meets a network of ``shared_ffn`` features where that is above 0, ``shared_gate`` weighs it.
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
        """Features of all feed-forward networks that one token meets."""
        return self.top_k * self.ffn + self.shared_ffn

    @property
    def loss_names(self) -> tuple[str, ...]:
        """The auxiliary losses that there are, under which a run reports them."""
        return ("model/balance_loss",) * (self.balance > 0) + ("model/z_loss",) * (self.z > 0)

    def capacity(self, tokens: int) -> int:
        """How many of a microbatch's ``tokens`` one expert takes: its even share times the factor, rounded up.

        Fedus et al. 2021, "Switch Transformers", equation 3.
        """
        assert self.capacity_factor is not None, "every expert takes what it is given"
        return math.ceil(tokens * self.top_k / self.count * self.capacity_factor)


Position = Literal["learned", "rope"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "swiglu"]


@dataclass(frozen=True)
class TransformerSpec:
    """One decoder: GPT-2 by its defaults (Radford et al. 2019), with the options of later models.

    ``sequence_length`` is the longest sequence, ``vocab`` is unpadded, ``dropout`` acts on the embedding, on the
    attention probabilities and on what each half of a block adds to the residual stream; ``label_smoothing`` on the
    training loss. Layers have ``experts`` in place of one feed-forward network where it says so.
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
        """Features of one attention head."""
        return self.hidden // self.heads

    @property
    def init(self) -> Init:
        """How matrices start."""
        return Init("normal", self.init_std)

    @property
    def residual_init(self) -> Init:
        """How matrices that add to the residual stream start: it sums 2L of them, so each is 1/sqrt(2L) as large."""
        return Init("normal", self.init_std / math.sqrt(2 * self.layers))

    @property
    def matmul_parameters(self) -> int:
        """Values of all matrices that a token multiplies: the blocks' and the output layer's, no embedding.

        Of experts those that it meets, and the router.
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
        """Floating-point operations of one token, forward and backward, at the full sequence length.

        ``6 N + 12 L s n d``: two operations a parameter and three passes over each matrix (one forward, two
        backward), and the two s x s products of attention counted in full, as if nothing were masked (Chowdhery et
        al. 2022, PaLM, appendix B). ``N`` counts the output layer and no embedding.
        """
        attention = self.layers * self.sequence_length * self.heads * self.head_size
        return 6.0 * self.matmul_parameters + 12.0 * attention
