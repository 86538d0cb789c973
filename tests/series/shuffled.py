"""Plugin of pytest: the files of tests in a random order, by the seed in the variable ``SHUFFLED``.

Tests of one file keep theirs, as they share what is costly to make.
"""

from __future__ import annotations

import os
import random

import pytest

#: The variable with the seed; without it the order stays.
SEED = "SHUFFLED"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each file a place by the seed: every worker finds the same order."""
    if seed := os.environ.get(SEED):
        files = sorted({str(item.path) for item in items})
        random.Random(seed).shuffle(files)
        place = {file: number for number, file in enumerate(files)}
        items.sort(key=lambda item: place[str(item.path)])
