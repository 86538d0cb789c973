"""A folder on the import path in which a test installs the plugins that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_plugins import FakeSite


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FakeSite]:
    made = FakeSite(tmp_path / "site")
    with made.importable():
        yield made
