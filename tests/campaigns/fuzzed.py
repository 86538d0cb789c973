"""Readers of foreign bytes as the fuzzer calls them: what is read, how its file is taken apart, and which there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaigns.mutations import Kind

#: Names of groups, which are rows of the table.
CONFIG, RUN, SAVED, MODEL, TOKENS, DATA, PLAN, WIRE = (
    "configurations",
    "run folders",
    "saved steps",
    "models and scripts of other programs",
    "tokenizers and templates",
    "data",
    "what the planner reads",
    "what comes over the network",
)


def _same(content: bytes) -> bytes:
    return content


def _replace(whole: bytes, content: bytes) -> bytes:
    return content


class FuzzedReader(NamedTuple):
    """``read`` is called with the path of ``file``, of which ``inner`` was changed and ``pack`` made a file again.

    ``share`` is the part of the inputs that it gets, beside 1 for others.
    """

    name: str
    group: str
    file: str
    read: Callable[[Path], object]
    kind: Kind = "bytes"
    inner: Callable[[bytes], bytes] = _same
    pack: Callable[[bytes, bytes], bytes] = _replace
    share: float = 1.0


READERS: dict[str, FuzzedReader] = {}


def reads(name: str, group: str, file: str, read: Callable[[Path], object], *more: Any, **options: Any) -> None:
    """Add a reader; the arguments are those of :class:`FuzzedReader`."""
    READERS[name] = FuzzedReader(name, group, file, read, *more, **options)
