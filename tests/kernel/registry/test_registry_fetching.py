"""Names of models elsewhere: which format takes one, and what is said where none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.errors import PluginError
from megatron_run.registry import fetching
from megatron_run.registry.discover import Catalog


def test_a_path_is_no_name_and_needs_no_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "scan", None)
    for path in ("runs/latest", "/a/folder", "./hf:model", "C:", "tokenizer.json"):
        assert fetching.fetch(path, "model") is None


def test_without_a_format_that_fetches_a_name_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fetching, "scan", lambda: Catalog(()))
    with pytest.raises(PluginError, match=r"hf:org/tiny is not fetched: no installed format knows hf:; type: pip"):
        fetching.local_folder(Path("hf:org/tiny"))
    (tmp_path / "a:folder").mkdir()
    assert fetching.local_folder(Path("a:folder")) == Path("a:folder")
