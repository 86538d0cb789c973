"""No test of a format installs or edits anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.plugins.format.looking_up import looked_up_once


@pytest.fixture(scope="module", autouse=True)
def _installed_is_looked_up_once() -> Iterator[None]:
    with looked_up_once():
        yield
