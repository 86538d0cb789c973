"""Lists of first-party plugins say what the plugins' metadata do."""

from __future__ import annotations

from pathlib import Path

import pytest
from cogapp import Cog

from tests.support.checkout import ROOT

KNOWN = "core/kernel/src/megatron_run/registry/known.py"
FILES = [ROOT / name for name in ("README.md", "docs/configuration.md", "pyproject.toml", KNOWN)]


@pytest.mark.parametrize("file", FILES, ids=[file.name for file in FILES])
def test_a_list_is_as_the_plugins_say(file: Path) -> None:
    cog, text = Cog(), file.read_text(encoding="utf-8")
    assert cog.process_string(text, str(file)) == text, "run make docs"


def test_a_list_that_says_something_else_is_found() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    other = page.replace("| `scaler` | the loss scale |", "| `scaler` | a scale |", 1)
    assert other != page
    assert Cog().process_string(other, "README.md") == page
