"""Splits documents into training, validation and test, by their contents alone.

Adding, removing or renaming a file never moves another one, and files with equal contents fall into the same split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_run.contracts.data import Split

#: A document of at least this many bytes is cut into the shares of all splits. A smaller one goes to one split whole.
CUT_FROM = 256 * 1024

_PLACE: Mapping[Split, int] = MappingProxyType({"train": 0, "validation": 1, "test": 2})


@dataclass(frozen=True)
class Shares:
    """How much of the data each split gets, in any unit: 90, 5, 5 is 0.9, 0.05, 0.05."""

    train: float
    validation: float
    test: float

    def bounds(self, split: Split) -> tuple[float, float]:
        """Return the part of [0, 1) that ``split`` covers."""
        shares = (self.train, self.validation, self.test)
        total, place = sum(shares), _PLACE[split]
        return sum(shares[:place]) / total, sum(shares[: place + 1]) / total

    def portion(self, content: bytes, split: Split, *, cut: bool = False) -> bytes:
        """Return the part of a document in ``split``: all, nothing, or a share if it is cut (see ``CUT_FROM``)."""
        low, high = self.bounds(split)
        if cut or len(content) >= CUT_FROM:
            return content[_boundary(content, low) : _boundary(content, high)]
        return content if low <= _place_of(content) < high else b""


def _place_of(content: bytes) -> float:
    """Return a number in [0, 1) that depends only on the contents."""
    return int.from_bytes(sha256(content).digest()[:6], "big") / 2**48  # 48 bits: exact in a float, never 1.0


def _boundary(content: bytes, share: float) -> int:
    """Return the offset at which the first ``share`` of ``content`` ends, never within a UTF-8 character."""
    offset = round(len(content) * share)
    # Skip continuation bytes, of which a character has at most three.
    following = content[offset : offset + 3]
    return offset + len(following) - len(following.lstrip(bytes(range(0x80, 0xC0))))
