"""What ``make test`` runs of a product shows each of its values and chosen pairs; ``make grid`` runs all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, product

import pytest

from tests.integration.pairwise import pairwise
from tests.support.checkout import ROOT

SIZES = {"shape": range(4), "type": "abc", "tied": (True, False), "deep": (True, False)}
ROWS = [dict(zip(SIZES, values, strict=True)) for values in product(*SIZES.values())]
PROGRAM = (
    "from tests.integration.pairwise import chosen\n"
    "print(len(chosen(range(9), lambda row: {'a': row % 3, 'b': 0}, 'ab')))"
)


def pairs(rows: list[dict[str, object]]) -> set[object]:
    return {pair for row in rows for pair in combinations(sorted(row.items()), 2)}


def test_every_pair_of_values_is_shown_by_about_as_many_rows_as_the_two_largest_axes_need() -> None:
    few = pairwise(ROWS, dict, SIZES)
    assert pairs(few) == pairs(ROWS)
    assert 4 * 3 <= len(few) <= 4 * 3 + 2 < len(ROWS) == 48


def test_of_axes_that_are_not_paired_each_value_is_shown() -> None:
    few = pairwise(ROWS, dict, ("type", "tied"))
    assert {(row["type"], row["tied"]) for row in few} == set(product("abc", (True, False)))
    assert {row["shape"] for row in few} == set(range(4))
    assert len(few) == 6


def test_what_a_product_lacks_is_not_asked_for() -> None:
    lacking = [row for row in ROWS if not (row["shape"] == 3 and row["tied"])]
    few = pairwise(lacking, dict, SIZES)
    assert pairs(few) == pairs(lacking)
    assert all(row in lacking for row in few)
    assert few == [row for row in lacking if row in few], "in their order"


def test_a_value_that_pairs_with_everything_takes_turns() -> None:
    few = pairwise(ROWS, dict, SIZES)
    for name in ("tied", "deep"):
        assert len(few) / 3 <= sum(bool(row[name]) for row in few) <= 2 * len(few) / 3


@pytest.mark.parametrize(("whole", "rows"), [("", 3), ("1", 9)])
def test_the_environment_asks_for_the_whole_product(whole: str, rows: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "WHOLE_PRODUCT": whole, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) == rows
