"""Nobody but the user may put files where what lies there is read, mapped or executed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from megatron_run_engine.data.user_cache import COMPILED, keep_compiled
from megatron_run_engine.training.process import rank_environment


def test_no_library_is_loaded_from_a_folder_of_a_name_that_anybody_can_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own choice is one of the shared temporary folder, also once torch has written it into the variable."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours, guessed = str(tmp_path / "megatron-run" / "inductor"), f"{tempfile.gettempdir()}/torchinductor_me"
    for before in ({}, {COMPILED: guessed}):
        assert rank_environment(before, 1, 1, 1)[COMPILED] == ours
    assert Path(ours).stat().st_mode & 0o77 == 0
    chosen = {COMPILED: str(tmp_path / "mine")}
    keep_compiled(chosen)
    assert chosen == {COMPILED: str(tmp_path / "mine")}


def test_a_cache_in_which_others_write_holds_nothing_that_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "megatron-run").mkdir()
    (tmp_path / "megatron-run").chmod(0o777)
    with pytest.raises(PermissionError):
        keep_compiled({})
