"""Counts tokens without a tokenizer: what a worker of a cleaning loads of the tests, and no more."""

from __future__ import annotations

from collections.abc import Sequence


def spaces(texts: Sequence[str]) -> list[int]:
    """The words of each text."""
    return [len(text.split()) for text in texts]
