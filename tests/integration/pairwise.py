"""A few rows of a product that show each of its values, and the pairs that matter most: what ``make test`` runs of it.

Two settings that do not get on are found by every row that has both. The whole product runs where the environment says
``WHOLE_PRODUCT=1``, as ``make grid`` does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row")
#: Whether files that have a product run all of it.
WHOLE = os.environ.get("WHOLE_PRODUCT", "") == "1"


Axes = Callable[[Row], Mapping[str, Hashable]]


def chosen(product: Sequence[Row], axes: Axes[Row], paired: Collection[str]) -> list[Row]:
    """All of ``product`` under ``make grid``, else :func:`pairwise` of it."""
    return list(product) if WHOLE else pairwise(product, axes, paired)


def pairwise(product: Iterable[Row], axes: Axes[Row], paired: Collection[str]) -> list[Row]:
    """Rows of ``product``, in its order, that show each value of its ``axes`` and each pair of two that are ``paired``.

    What no row shows is not asked for. Greedy: the row that shows most of what is missing comes next; of equals the one
    whose values were seen least, so that values which pair with everything take turns, and then the first.
    """
    rows = list(product)
    values = [sorted(axes(row).items()) for row in rows]
    pairs = [
        {*combinations((value for value in each if value[0] in paired), 2), *((value,) for value in each)}
        for each in values
    ]
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
