"""Lists that are kept: first-party plugins as their metadata say, and the features of the changelog."""

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


def test_the_changelog_has_a_line_for_each_feature_and_at_most_sixty() -> None:
    added = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("### Added\n\n")[2].partition("\n\n")[0]
    assert all(line.startswith("- ") for line in added.splitlines()), "one line a feature"
    assert len(added.splitlines()) <= 60, "join two, or name what they have in common"
