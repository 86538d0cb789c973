"""The sizes and choices of a layer of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

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
