"""Splits: disjoint, complete, and decided by each document alone."""

from __future__ import annotations

from hashlib import sha256
from typing import get_args

import pytest

from megatron_run.contracts import Split
from megatron_run_engine.data.documents import CUT_FROM, Shares

SPLITS: tuple[Split, ...] = get_args(Split)
DOCUMENTS = [f"document {number}".encode() for number in range(2000)]


def portion(shares: Shares, content: bytes, split: Split, *, cut: bool = False) -> bytes:
    return dict(shares.portions(content, cut=cut)).get(split, b"")


def test_bounds_are_shares_in_any_unit() -> None:
    for shares in (Shares(90, 5, 5), Shares(0.9, 0.05, 0.05)):
        assert [bound for split in SPLITS for bound in shares.bounds(split)] == pytest.approx(
            [0, 0.9, 0.9, 0.95, 0.95, 1]
        )
    assert Shares(1, 1, 1).bounds("test")[1] == 1.0


def test_each_document_goes_to_exactly_one_split_whole() -> None:
    shares = Shares(90, 5, 5)
    for document in DOCUMENTS:
        parts = [portion(shares, document, split) for split in SPLITS]
        assert sorted(parts) == [b"", b"", document]


def test_the_splits_have_their_shares() -> None:
    shares = Shares(0.8, 0.15, 0.05)
    for split, share in zip(SPLITS, (0.8, 0.15, 0.05), strict=True):
        count = sum(bool(portion(shares, document, split)) for document in DOCUMENTS)
        assert abs(count - share * 2000) < 4 * (2000 * share * (1 - share)) ** 0.5


def test_the_place_of_a_document_is_its_hash() -> None:
    for document in DOCUMENTS[:50]:
        place = int(sha256(document).hexdigest()[:12], 16) / 16**12
        assert bool(portion(Shares(50, 25, 25), document, "train")) == (place < 0.5)


def test_a_share_of_zero_gets_nothing() -> None:
    shares = Shares(1, 0, 1)
    assert not any(portion(shares, document, "validation") for document in DOCUMENTS)
    assert portion(shares, b"x" * CUT_FROM, "validation") == b""


@pytest.mark.parametrize("content", [b"a" * CUT_FROM, "aä€😀".encode() * 40_000, bytes(range(256)) * 1024])
def test_a_large_document_is_cut_into_its_shares(content: bytes) -> None:
    parts = [portion(Shares(90, 5, 5), content, split) for split in SPLITS]
    assert b"".join(parts) == content
    for part, share in zip(parts, (0.9, 0.05, 0.05), strict=True):
        assert len(part) == pytest.approx(share * len(content), abs=4)


def test_a_cut_never_divides_a_character() -> None:
    for length in range(1, 60):
        content = "aä€😀".encode() * length
        for split in SPLITS:
            portion(Shares(7, 5, 3), content, split, cut=True).decode("utf-8")
