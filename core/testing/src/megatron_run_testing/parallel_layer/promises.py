"""Promises of a factory besides the values of its layers: dropout masks, causality, padding and shared weights.

Legend: s sequence, b micro batch, h hidden, n heads, d head size, p padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_run.contracts import AttentionShape, Microbatch
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing import CheckFailed
from megatron_run_testing.parallel_layer.member import HIDDEN, INIT, LENGTH, VOCAB, Member, Rank, vocabulary
from megatron_run_testing.parallel_layer.trial import Trial, Values, values_of

_MICROBATCH = Microbatch(0, 1, 0, {})


def rules() -> tuple[Trial, ...]:
    """All of these trials."""
    return (_Dropout(), _AttentionDropout(), _Causal(), _Padding(), _SharedWeight())


@dataclass(frozen=True)
class _Dropout:
    """Dropout outside split layers: one mask on all ranks for replicated x, different masks for a split sequence."""

    name: str = "dropout drops and rescales"

    def run(self, rank: Rank) -> dict[str, Values]:
        context = rank.context()
        dropout = rank.create(context).dropout(0.25)
        x = torch.ones(16 * LENGTH // context.sequence_shards, 4, 64, dtype=rank.dtype, device=rank.device)
        x.requires_grad_()
        drawn = _drawn(context, lambda: dropout.train()(x))
        _at(context, 0)
        dropout(x).sum().backward()
        assert x.grad is not None
        return {**drawn, "gradient": values_of(x.grad), "evaluation": values_of(dropout.eval()(x))}

    def judge(self, found: Mapping[Member, dict[str, Values]], tolerance: float) -> None:
        for member, drawn in found.items():
            _reproducible(drawn, f"dropout on {member}")
            if (drawn["evaluation"] != 1).any():
                raise CheckFailed(f"dropout on {member} changes x in an evaluation")
            y = drawn["first"]
            if not 0.2 < (dropped := float((y == 0).mean())) < 0.3:
                raise CheckFailed(f"dropout with p = 0.25 on {member} dropped {dropped:.1%}")
            if not np.allclose(y[y != 0], 1 / 0.75, rtol=max(tolerance, 1e-6)):
                raise CheckFailed(f"dropout with p = 0.25 on {member} made {y.max():g} of ones that it kept")
            if not np.array_equal(drawn["gradient"], y):
                raise CheckFailed(f"dropout on {member}: the backward drops other values than the forward")
        _compare_ranks(found, "dropout", differ=next(iter(found)).sequence)


@dataclass(frozen=True)
class _AttentionDropout:
    """Dropout in attention: ranks hold different heads, so their masks differ, whether the sequence is split or not."""

    name: str = "attention dropout differs between ranks"

    def run(self, rank: Rank) -> dict[str, Values]:
        context = rank.context()
        size = rank.topology.sizes.tensor
        core = rank.create(context).core_attention(AttentionShape(4 * size, 4 * size, 8, 0), 0.5)
        x = torch.ones(4 * LENGTH, 2, 4, 8, dtype=rank.dtype, device=rank.device)  # the same heads on every rank
        everything = torch.ones(1, 1, len(x), len(x), dtype=torch.bool, device=rank.device)
        drawn = _drawn(context, lambda: core.train()(x, x, x, everything))
        return {**drawn, "evaluation": values_of(core.eval()(x, x, x, everything))}

    def judge(self, found: Mapping[Member, dict[str, Values]], tolerance: float) -> None:
        for member, drawn in found.items():
            _reproducible(drawn, f"attention with dropout on {member}")
            if not np.allclose(drawn["evaluation"], 1, rtol=max(tolerance, 1e-6)):
                raise CheckFailed(f"attention on {member} drops probabilities in an evaluation")
            if not 0.9 < (mean := float(drawn["first"].mean())) < 1.1:
                raise CheckFailed(
                    f"attention with dropout on {member} gives {mean:.3f} of the values, expected about 1"
                )
        _compare_ranks(found, "attention with dropout", differ=True)


@dataclass(frozen=True)
class _Causal:
    """Later positions do not affect earlier ones, and a causal mask is equivalent to no mask."""

    name: str = "attention is causal without a mask"

    def run(self, rank: Rank) -> dict[str, Values]:
        size = rank.topology.sizes.tensor
        attention = rank.layers().core_attention(AttentionShape(4 * size, 2 * size, 8, 0), 0.0)
        generator = torch.Generator().manual_seed(3)
        query, key, value = (
            torch.randn(6, 2, heads, 8, generator=generator).to(rank.device, rank.dtype) for heads in (4, 2, 2)
        )
        before = attention(query, key, value, None)
        masked = attention(query, key, value, torch.ones(6, 6, dtype=torch.bool, device=rank.device).tril())
        key[4:], value[4:] = 9.0, -9.0
        after = attention(query, key, value, None)
        return {"before": values_of(before), "masked": values_of(masked), "after": values_of(after)}

    def judge(self, found: Mapping[Member, dict[str, Values]], tolerance: float) -> None:
        for member, seen in found.items():
            if not np.allclose(seen["masked"], seen["before"], tolerance, tolerance):
                raise CheckFailed(f"attention with a causal mask on {member} is not attention without a mask")
            if not np.allclose(seen["after"][:4], seen["before"][:4], tolerance, tolerance):
                raise CheckFailed(f"attention on {member}: a later position changes an earlier one")


@dataclass(frozen=True)
class _Padding:
    """The values of padding columns do not change the loss and get no gradient."""

    name: str = "padding is not a class"

    def run(self, rank: Rank) -> tuple[Values, Values, Values]:
        logits, labels = _logits_and_labels()
        local = rank.given(logits, vocabulary)
        assert local is not None
        columns = torch.arange(local.shape[-1], device=rank.device) + rank.member.index * rank.member.rows
        with torch.no_grad():
            local[..., columns >= VOCAB] = 7.0
        loss = rank.layers().cross_entropy(VOCAB)(local, labels.to(rank.device))
        loss.sum().backward()
        assert local.grad is not None
        return values_of(loss), values_of(local.grad), values_of(columns)

    def judge(self, found: Mapping[Member, tuple[Values, Values, Values]], tolerance: float) -> None:
        logits, labels = _logits_and_labels()
        expected = F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none").t().numpy()
        for member, (loss, gradient, columns) in found.items():
            if not np.allclose(loss, expected, tolerance, tolerance):
                raise CheckFailed(f"loss with padding on {member} is {loss[0, 0]:g}, expected {expected[0, 0]:g}")
            if gradient[..., columns >= VOCAB].any():
                raise CheckFailed(f"on {member} a gradient flows into the padding columns of the logits")


@dataclass(frozen=True)
class _SharedWeight:
    """A tied output layer has no weight of its own."""

    name: str = "an output layer shares the weight it is given"

    def run(self, rank: Rank) -> bool:
        layers = rank.layers()
        shared = next(layers.vocab_embedding(VOCAB, HIDDEN, init=INIT).parameters())
        output = layers.output_layer(VOCAB, HIDDEN, init=INIT, weight=shared)
        return [id(parameter) for parameter in output.parameters()] == [id(shared)]

    def judge(self, found: Mapping[Member, bool], tolerance: float) -> None:
        for member, alone in found.items():
            if not alone:
                raise CheckFailed(f"output_layer(weight=w) does not hold w alone on {member}")


def _logits_and_labels() -> tuple[Tensor, Tensor]:
    """Logits [s, b, v] and labels [b, s], equal in every process."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(LENGTH, 2, VOCAB, generator=generator, dtype=torch.float64)
    return logits, torch.randint(VOCAB, (2, LENGTH), generator=generator)


def _at(context: BuildContext, segment: int) -> None:
    context.rng.position(_MICROBATCH, 3, segment)


def _drawn(context: BuildContext, draw: Any) -> dict[str, Values]:
    """Results of ``draw`` at one position of the random streams, at the same position again, and at another."""
    results = {}
    for name, segment in (("first", 0), ("again", 0), ("elsewhere", 1)):
        _at(context, segment)
        results[name] = values_of(draw())
    return results


def _reproducible(drawn: Mapping[str, Values], what: str) -> None:
    if not np.array_equal(drawn["first"], drawn["again"]):
        raise CheckFailed(f"{what} drops other values when it is run again from the same position")
    if np.array_equal(drawn["first"], drawn["elsewhere"]):
        raise CheckFailed(f"{what} drops the same values in another segment")


def _compare_ranks(found: Mapping[Member, dict[str, Values]], what: str, *, differ: bool) -> None:
    for (one, values), (other, peer_values) in combinations(found.items(), 2):
        if np.array_equal(values["first"], peer_values["first"]) == differ:
            same, wanted = ("the same values", "different ones") if differ else ("different values", "the same ones")
            raise CheckFailed(f"{what} drops {same} on {one} and {other}, expected {wanted}")
