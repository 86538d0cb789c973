"""A few rows of a product that show every pair of values which the product shows: what ``make test`` runs of it.

Two settings that do not get on are found by every row that has both. The whole product runs where the environment says
``WHOLE_PRODUCT=1``, as ``make grid`` does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row")
#: Whether files that have a product run all of it.
WHOLE = os.environ.get("WHOLE_PRODUCT", "") == "1"


def chosen(product: Sequence[Row], axes: Callable[[Row], Mapping[str, Hashable]]) -> list[Row]:
    """All of ``product`` under ``make grid``, else the pairs of it."""
    return list(product) if WHOLE else pairwise(product, axes)


def pairwise(product: Iterable[Row], axes: Callable[[Row], Mapping[str, Hashable]]) -> list[Row]:
    """Rows of ``product``, in its order, that show each pair of values of two ``axes`` that any row shows.

    Greedy: the row with most pairs that are missing comes next; of equals the one whose values were seen least, so that
    values which pair with everything take turns, and then the first.
    """
    rows = list(product)
    values = [sorted(axes(row).items()) for row in rows]
    pairs = [set(combinations(each, 2)) for each in values]
    missing = set[object]().union(*pairs)
    seen, taken = Counter[object](), list[int]()

    def gain(index: int) -> tuple[int, int, int]:
        return len(pairs[index] & missing), -sum(seen[value] for value in values[index]), -index

    while missing:
        best = max(range(len(rows)), key=gain)
        taken.append(best)
        missing -= pairs[best]
        seen.update(values[best])
    return [rows[index] for index in sorted(taken)]
