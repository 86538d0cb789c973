"""Attention of a piece of queries to a piece of keys, and how such pairs add up to the attention to all keys.

Legend: b micro batch, n heads, k key-value heads, g = n / k heads that share keys, d head size, s tokens of a sample, p
tokens of a piece, r queries of a tile, c keys that these see.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_run_engine.nn import on_cpu
from megatron_run_parallel_layer_context.fused import Forward, Sight, fused, fused_backward, fuses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

#: Queries of a tile: scores of so many are in memory at once, and skip most keys that the causal mask hides.
ROWS = 128


@dataclass(frozen=True)
class Rule:
    """The rule of an attention: as :class:`megatron_run.contracts.AttentionShape`, ``scale`` always given."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0

    def without_dropout(self) -> Rule:
        """The same outside of training."""
        return replace(self, dropout=0.0)

    def visible(self, queries: range, keys: range) -> range:
        """The ``keys`` that some of ``queries`` sees."""
        start = keys.start if self.window is None else max(keys.start, queries.start - self.window + 1)
        return range(start, max(start, min(keys.stop, queries.stop)))

    def all_seen(self, queries: range, keys: range) -> bool:
        """Whether each of ``queries`` sees each of ``keys``."""
        return keys.stop <= queries.start + 1 and (self.window is None or queries.stop - keys.start <= self.window)


def _first_columns(documents: Tensor, held: Sequence[range]) -> Tensor:
    """Where the document of each column of ``held`` begins, from bounds [b, c]: [b, s/C]."""
    columns = torch.cat([torch.arange(each.start, each.stop, device=documents.device) for each in held])
    # The last bound at or before a column begins its document, also after documents of no tokens.
    index = torch.searchsorted(documents, columns.expand(len(documents), -1).contiguous(), right=True)
    return documents.gather(1, index - 1)


class _Tile(NamedTuple):
    """Queries of one tile and the keys that they see, as columns of the sample and as slices of this rank's pieces."""

    queries: range
    keys: range
    rows: slice
    columns: slice


class _Pairs:
    """This rank's queries [b, n, s/C, d], which lie in ``columns`` of the sample.

    ``documents`` [b, c] are the bounds of those of packed rows. ``stream`` are the random numbers of dropout, which are
    drawn in the order of the tiles.
    """

    def __init__(
        self, query: Tensor, columns: Sequence[range], documents: Tensor | None, rule: Rule, stream: torch.Generator
    ) -> None:
        self._q, self._columns, self._rule, self._stream = query, columns, rule, stream
        self._documents = documents
        self._first = None if documents is None else _first_columns(documents, columns)  # [b, s/C]

    def _fused(self, queries: range, keys: range) -> bool:
        """Whether a library's kernel computes this pair: all keys are seen, or those up to the query itself."""
        rule = self._rule
        plain = rule.softcap is None and not rule.dropout and fuses(self._q, packed=self._documents is not None)
        diagonal = queries == keys and (rule.window is None or rule.window >= len(keys))
        return plain and (diagonal or rule.all_seen(queries, keys))

    def _pairs(self, keys: Sequence[range]) -> Iterator[tuple[range, range, slice, slice]]:
        """Every piece of queries with every piece of ``keys`` of which it sees something, and where they lie here."""
        places = (slice(0, len(self._columns[0])), slice(len(self._columns[0]), None))
        for (here, rows), (there, columns) in product(
            zip(self._columns, places, strict=True), zip(keys, places, strict=True)
        ):
            if self._rule.visible(here, there):
                yield here, there, rows, columns

    def _tiles(self, queries: range, keys: range, rows: slice, columns: slice) -> Iterator[_Tile]:
        """The tiles of one pair; those that see nothing are left out."""
        for start in range(queries.start, queries.stop, ROWS):
            tile = range(start, min(start + ROWS, queries.stop))
            seen = self._rule.visible(tile, keys)
            here = slice(rows.start + tile.start - queries.start, rows.start + tile.stop - queries.start)
            if self._first is not None and on_cpu(self._first):  # elsewhere the host would wait for it
                seen = range(max(seen.start, int(self._first[:, here.start].min())), seen.stop)
            if seen:
                there = slice(columns.start + seen.start - keys.start, columns.start + seen.stop - keys.start)
                yield _Tile(tile, seen, here, there)

    def _scores(self, tile: _Tile, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """Query [b, k, g*r, d] and key [b, k, c, d] -> products [b, k, g*r, c], scaled, capped, masked, fp32 or more.

        The second result are those before the mask, where they are capped.
        """
        rule = self._rule
        scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * rule.scale
        capped = None
        if rule.softcap is not None:
            scores = capped = rule.softcap * torch.tanh(scores / rule.softcap)
        hidden = self._hidden(tile)
        if hidden is not None:
            by_head = scores.unflatten(2, (-1, len(tile.queries)))  # [b, k, g, r, c]
            scores = by_head.masked_fill(hidden, -torch.inf).flatten(2, 3)
        return scores, capped

    def _hidden(self, tile: _Tile) -> Tensor | None:
        """Where a query of ``tile`` must not attend, [r, c] or [b, 1, 1, r, c]; None where it may everywhere."""
        if self._first is None and self._rule.all_seen(tile.queries, tile.keys):
            return None
        queries, keys = (
            torch.arange(each.start, each.stop, device=self._q.device) for each in (tile.queries, tile.keys)
        )
        hidden = keys > queries[:, None]
        if self._rule.window is not None:
            hidden |= keys <= queries[:, None] - self._rule.window
        if self._first is None:
            return hidden
        first = self._first[:, tile.rows, None]  # [b, r, 1]
        return (hidden | (keys < first))[:, None, None]

    def _kept(self, probabilities: Tensor) -> Tensor | None:
        """The factors by which dropout multiplies ``probabilities``; None without."""
        rate = self._rule.dropout
        if not rate:
            return None
        return torch.empty_like(probabilities).bernoulli_(1 - rate, generator=self._stream).div_(1 - rate)


class Attended(_Pairs):
    """The attention to the keys added so far: ``out`` [b, n, s/C, d] and ``logsum`` [b, n, s/C], in at least fp32."""

    def __init__(
        self, query: Tensor, columns: Sequence[range], documents: Tensor | None, rule: Rule, stream: torch.Generator
    ) -> None:
        super().__init__(query, columns, documents, rule, stream)
        self.out = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        self.logsum = self.out.new_full(query.shape[:-1], -torch.inf)

    def add(self, key: Tensor, value: Tensor, columns: Sequence[range]) -> None:
        """Attend to keys and values [b, k, s/C, d] of ``columns`` too."""
        for queries, keys, rows, place in self._pairs(columns):
            if self._fused(queries, keys):
                given = (self._q[:, :, rows], key[:, :, place], value[:, :, place])
                self._join(rows, *fused(*given, Sight(queries, keys, self._documents), self._rule.scale))
                continue
            for tile in self._tiles(queries, keys, rows, place):
                self._join(tile.rows, *self._tile(tile, key[:, :, tile.columns], value[:, :, tile.columns]))

    def _tile(self, tile: _Tile, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        heads = key.shape[1]
        query = self._q[:, :, tile.rows].unflatten(1, (heads, -1)).flatten(2, 3)  # [b, k, g*r, d]
        scores, _ = self._scores(tile, query, key)
        logsum = scores.logsumexp(-1)
        probabilities = (scores - _finite(logsum)[..., None]).exp_()
        kept = self._kept(probabilities)
        probabilities = probabilities if kept is None else probabilities * kept
        out = probabilities.to(value.dtype) @ value
        out, logsum = (each.unflatten(2, (-1, len(tile.queries))).flatten(1, 2) for each in (out, logsum))
        return out, logsum

    def _join(self, rows: slice, out: Tensor, logsum: Tensor) -> None:
        """Join ``out`` [b, n, r, d] and ``logsum`` [b, n, r] of other keys with those of the queries ``rows``."""
        before = self.logsum[:, :, rows]
        both = torch.logaddexp(before, logsum)
        whole = _finite(both)
        shares = ((before - whole).exp()[..., None], (logsum - whole).exp()[..., None])
        self.out[:, :, rows] = self.out[:, :, rows] * shares[0] + out * shares[1]
        self.logsum[:, :, rows] = both


class Largest(_Pairs):
    """The largest score of each head with the keys added so far, ``found`` [n], in at least fp32."""

    def __init__(
        self, query: Tensor, columns: Sequence[range], documents: Tensor | None, rule: Rule, stream: torch.Generator
    ) -> None:
        super().__init__(query, columns, documents, replace(rule, softcap=None), stream)
        wide = torch.promote_types(query.dtype, torch.float32)
        self.found = query.new_full((query.shape[1],), -torch.inf, dtype=wide)

    def add(self, key: Tensor, columns: Sequence[range]) -> None:
        """Look at keys [b, k, s/C, d] of ``columns`` too."""
        for tile in (tile for pair in self._pairs(columns) for tile in self._tiles(*pair)):
            query = self._q[:, :, tile.rows].unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # [b, k, g*r, d]
            scores, _ = self._scores(tile, query, key[:, :, tile.columns])
            by_head = scores.unflatten(2, (-1, len(tile.queries))).amax((0, 3, 4)).flatten()  # [b, k, g, r, c] -> [n]
            self.found = torch.maximum(self.found, by_head)


class Gradients(_Pairs):
    """The gradients of ``forward``, what :class:`Attended` has made; ``query`` [b, n, s/C, d] adds up over the keys."""

    def __init__(
        self,
        forward: Forward,
        columns: Sequence[range],
        documents: Tensor | None,
        rule: Rule,
        stream: torch.Generator,
    ) -> None:
        super().__init__(forward.query, columns, documents, rule, stream)
        self._forward = forward
        self._delta = (forward.grad.to(forward.logsum.dtype) * forward.out).sum(-1)  # [b, n, s/C]
        self.query = torch.zeros_like(forward.query, dtype=forward.logsum.dtype)

    def of(self, key: Tensor, value: Tensor, columns: Sequence[range]) -> Tensor:
        """The gradients of keys and values [b, k, s/C, d] of ``columns``: [2, b, k, s/C, d] in at least fp32."""
        found = self.query.new_zeros(2, *key.shape)
        for queries, keys, rows, place in self._pairs(columns):
            if self._fused(queries, keys):
                given = (self._forward.of(rows), key[:, :, place], value[:, :, place])
                query, *parts = fused_backward(*given, Sight(queries, keys, self._documents), self._rule.scale)
                self.query[:, :, rows] += query
                for whole, part in zip(found, parts, strict=True):
                    whole[:, :, place] += part
                continue
            for tile in self._tiles(queries, keys, rows, place):
                self._tile(tile, key[:, :, tile.columns], value[:, :, tile.columns], found[:, :, :, tile.columns])
        return found

    def _tile(self, tile: _Tile, key: Tensor, value: Tensor, found: Tensor) -> None:
        """Add to ``found`` [2, b, k, c, d], and to the gradients of the tile's queries."""
        rule, heads, rows = self._rule, key.shape[1], tile.rows
        query, _, logsum, grad = (each.unflatten(1, (heads, -1)).flatten(2, 3) for each in self._forward.of(rows))
        delta = self._delta[:, :, rows].unflatten(1, (heads, -1)).flatten(2, 3)
        scores, capped = self._scores(tile, query, key)
        probabilities = (scores - _finite(logsum)[..., None]).exp_()  # [b, k, g*r, c]
        kept = self._kept(probabilities)
        weights = probabilities if kept is None else probabilities * kept
        found[1] += weights.to(grad.dtype).transpose(-1, -2) @ grad
        slopes = (grad @ value.transpose(-1, -2)).to(probabilities.dtype)
        slopes = slopes if kept is None else slopes * kept
        slopes = probabilities * (slopes - delta[..., None]) * rule.scale
        if capped is not None:
            assert rule.softcap is not None
            slopes = slopes * (1 - (capped / rule.softcap).square())
        slopes = slopes.to(query.dtype)
        found[0] += slopes.transpose(-1, -2) @ query
        self.query[:, :, rows] += (slopes @ key).unflatten(2, (-1, len(tile.queries))).flatten(1, 2)


def _finite(logsum: Tensor) -> Tensor:
    """``logsum``, where queries that have seen no key yet have 0: what is subtracted from -inf leaves that."""
    return logsum.masked_fill(logsum == -torch.inf, 0)
