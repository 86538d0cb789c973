"""QK-clip (Kimi Team 2025, "Kimi K2", section 2.1): queries and keys shrink where attention scores grew too large.

A head whose largest score of a step was s > limit gets the rows that make its queries and keys multiplied by
(limit / s)^p after the update. The exponents p of a query and a key add up to 1, so that the score would be the limit.
Query heads that share keys shrink together, by the largest score among them.

Legend: n query heads, k key-value heads, t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_run.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from megatron_run.contracts import ParallelLayers, ParameterSpec
    from megatron_run_engine.nn.attention import Attention
    from megatron_run_engine.nn.attention_scores import HeadRows
    from megatron_run_engine.nn.rotary import Rotary
    from megatron_run_engine.runtime.context import BuildContext

    Make = Callable[[int, Rotary | None], Attention]


class _Factors(NamedTuple):
    """Those of a parameter's rows, a view [heads, rows of a head], and the exponents [rows of a head]."""

    values: Tensor
    powers: Tensor


class _Watched(NamedTuple):
    """The largest score of each head of an attention in this step, [n/t], and the factors of its rows."""

    peaks: Tensor
    factors: tuple[_Factors, ...]


class QkClip:
    """Clips the attentions that it watches where a score is above ``limit``.

    The factors are :attr:`megatron_run.contracts.ParamInfo.row_factors`, by which the optimizer multiplies.
    """

    def __init__(self, context: BuildContext, limit: float) -> None:
        self._limit, self._like = limit, torch.empty(0, dtype=context.dtypes.main, device=context.device)
        self._replicas = context.groups.parallel_group(context.topology, "replicas")
        self._meter = context.metrics.largest("model/largest_score")
        self._watched: list[_Watched] = []

    def watching(self, make: Make, layers: ParallelLayers) -> Make:
        """``make``, whose attentions are watched from now on. Raises :class:`InputError` for those that cannot be."""

        def watched(layer: int, rotary: Rotary | None) -> Attention:
            if (adapters := layers.adapters()) is not None:
                raise InputError(
                    f"model.attention.qk_clip scales weights, and parallel-layer={adapters.name} freezes them",
                    fix="leave model.attention.qk_clip out",
                )
            attention = make(layer, rotary)
            self._watch(attention)
            return attention

        return watched

    def set_factors(self, *, skipped: bool) -> None:
        """Give the rows their factors by the step's scores, unless it is ``skipped``, and begin anew. Collective."""
        if not self._watched:  # so too on the other ranks of this stage
            return
        if not skipped:
            peaks = self._replicas.max_(torch.stack([watched.peaks for watched in self._watched]))
            for peak, watched in zip(peaks, self._watched, strict=True):
                self._scale(peak, watched.factors)
        for watched in self._watched:
            watched.peaks.fill_(-torch.inf)

    def _scale(self, peaks: Tensor, factors: tuple[_Factors, ...]) -> None:
        groups = min(len(each.values) for each in factors)  # k/t
        shared = peaks.view(groups, -1).amax(1)
        shrunk = (self._limit / shared).where(shared > self._limit, 1.0)
        for each in factors:
            by_head = shrunk.repeat_interleave(len(each.values) // groups)
            each.values.copy_(by_head[:, None] ** each.powers)

    def _watch(self, attention: Attention) -> None:
        factors = tuple(each for rows in attention.head_rows() for each in self._factors(rows))
        peaks = self._like.new_full((max(len(each.values) for each in factors),), -torch.inf)
        attention.watch_scores(peaks, self._meter)
        self._watched.append(_Watched(peaks, factors))

    def _factors(self, rows: HeadRows) -> Iterator[_Factors]:
        """Those of each parameter with ``rows``: weight and bias. The parameters' specs get them."""
        powers = self._like.new_tensor(rows.powers)
        for specs, name, length in _parameters(rows.layer):
            for part in specs[name].parts:
                if part.name.partition(".")[0] == rows.part:
                    spec = specs[name]
                    factors = self._like.new_ones(length) if spec.row_factors is None else spec.row_factors
                    specs[name] = replace(spec, row_factors=factors)
                    yield _Factors(factors[part.local.start : part.local.stop].view(-1, len(powers)), powers)


def _parameters(layer: nn.Module) -> Iterator[tuple[dict[str, ParameterSpec], str, int]]:
    """Where the spec of each parameter of ``layer`` is, and the number of its rows."""
    for module in layer.modules():
        specs: dict[str, ParameterSpec] = getattr(module, "parameter_specs", {})
        yield from ((specs, name, len(p)) for name, p in module.named_parameters(recurse=False) if name in specs)
