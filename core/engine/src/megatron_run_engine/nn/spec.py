"""The sizes and choices from which transformer pieces are built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron_run.contracts import Init
from megatron_run_engine.nn.moe.moe_spec import ExpertSpec

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
