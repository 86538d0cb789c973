"""Choosing the next token from logits: greedily, or by a number that depends on seed, sample and position alone.

Legend: b rows, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import torch

from megatron_run.errors import InputError
from megatron_run_engine.runtime.rng import mix

if TYPE_CHECKING:
    from torch import Tensor

#: Logits closer to the largest than this, relative to it, are ties, which the lowest token id wins: the same text comes
#: from any split of the model, though sums in another order differ in the last digits.
TIE = 1e-5


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: ``temperature`` 0 takes the likeliest, whatever the other values are.

    In this order, as in ``transformers``: the logits of tokens that the text holds are divided by
    ``repetition_penalty`` where positive and multiplied where negative (Keskar et al. 2019, CTRL); all are divided by
    the temperature; only the ``top_k`` largest stay (0: all); only the smallest set of likeliest tokens whose
    probabilities reach ``top_p`` stays (Holtzman et al. 2019). Raises :class:`InputError` for a value out of range.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, right, rule in (
            ("temperature", 0 <= self.temperature < inf, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < inf, "above 0"),
        ):
            if not right:
                raise InputError(f"{name}={getattr(self, name)}: it must be {rule}")


def choose_tokens(logits: Tensor, texts: Sequence[Sequence[int]], samples: Sequence[int], sampling: Sampling) -> Tensor:
    """The next token of each row, int64 [b], from ``logits`` fp32 [b, v].

    Row i continues the tokens ``texts[i]`` as sample ``samples[i]``. Its random number is a function of seed, sample
    and position, so that a text does not depend on its neighbours in the batch. The cumulative probabilities run over
    token ids, not over ranks: a difference in the last digit moves a boundary by as much and never swaps two tokens.
    """
    if sampling.repetition_penalty != 1:
        logits = _penalised(logits, texts, sampling.repetition_penalty)
    if sampling.temperature == 0:
        best = logits.amax(-1, keepdim=True)
        return (logits >= best - TIE * best.abs().clamp(min=1)).int().argmax(-1)  # the first of equal ones
    scores = logits.double() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[:, -1:], -inf)
    if sampling.top_p < 1:
        scores = _nucleus(scores, sampling.top_p)
    reached = scores.softmax(-1).cumsum(-1)  # [b, v]
    numbers = [mix(sampling.seed, sample, len(text)) / 2**63 for text, sample in zip(texts, samples, strict=True)]
    drawn = torch.tensor(numbers, dtype=reached.dtype, device=reached.device)[:, None] * reached[:, -1:]
    return torch.searchsorted(reached, drawn, right=True)[:, 0].clamp(max=scores.shape[-1] - 1)


def _penalised(logits: Tensor, texts: Sequence[Sequence[int]], penalty: float) -> Tensor:
    held = torch.zeros_like(logits, dtype=torch.bool)
    for row, text in enumerate(texts):
        held[row, torch.tensor(sorted(set(text)), device=logits.device)] = True
    return torch.where(held, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """``scores`` [b, v] without the tokens before which likelier ones reach ``top_p``; the likeliest always stays."""
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    dropped = before >= top_p
    dropped[:, 0] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter(-1, ids, dropped), -inf)
