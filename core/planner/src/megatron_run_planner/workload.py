"""What is trained, and how it is split over devices: all that the planner knows of a run.

Legend: ``s`` sequence, ``b`` micro batch, ``h`` hidden, ``t`` tensor-parallel size, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

#: Nothing, the core of the attention, the feed-forward half, or the whole layer: as `train.recompute` has it.
Recompute = Literal["none", "core", "mlp", "full"]


@dataclass(frozen=True)
class Model:
    """A decoder. ``kv_heads`` and ``ffn`` of 0 stand for ``heads`` and 4 x ``hidden``.

    ``gated`` feed-forward layers have a third matrix. With ``experts``, every layer has that many feed-forward layers
    of width ``expert_ffn`` (0: ``ffn``), of which a token meets ``top_k``. ``flash`` attention never stores its s x s
    scores. ``tied``: the head shares the embedding's matrix.
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

    @property
    def head_size(self) -> float:
        """Width of a head."""
        return self.head or self.hidden / self.heads

    @property
    def context_width(self) -> float:
        """Width of what all heads give to the output projection."""
        return self.heads * self.head_size

    @property
    def plain(self) -> bool:
        """Whether its layers are those of GPT-2, at which layers were measured."""
        return not (self.gated or self.experts or self.flash or self.kv_heads not in (0, self.heads))

    @property
    def qkv_width(self) -> float:
        """Columns of the projection to queries, keys and values."""
        return (self.heads + 2 * (self.kv_heads or self.heads)) * self.head_size

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
        return self.hidden * (self.qkv_width + self.context_width)

    @cached_property
    def ffn_parameters(self) -> float:
        """Weights of a layer's feed-forward part, all experts and the router included."""
        one = self.matrices * self.hidden * self.ffn_width
        return one * self.experts + self.hidden * self.experts if self.experts else one

    @property
    def parameters(self) -> float:
        """Weights of the model, without biases and norms."""
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (self.attention_parameters + self.ffn_parameters) + tables

    @cached_property
    def flops_per_token(self) -> float:
        """Floating-point operations of forward and backward for one token, without recomputation.

        6 per weight that the token meets, and 12 s h a layer for all scores (Narayanan et al. 2021, appendix).
        """
        met = self.matrices * self.hidden * self.ffn_width * (self.top_k or 1)
        layer = 6 * (self.attention_parameters + met) + 12 * self.sequence * self.context_width
        return self.layers * layer + 6 * self.hidden * self.vocabulary


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
