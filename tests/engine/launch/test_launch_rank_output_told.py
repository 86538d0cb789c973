"""Notices about an environment are told once in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_run.planning.choosing import EnvironmentNotice
from megatron_run_engine.launch.rank_output import untold

NOTICES = ("about the run", EnvironmentNotice("observer=a is left out"), EnvironmentNotice("observer=b is left out"))


def test_a_notice_about_the_environment_is_told_once_and_one_about_the_run_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tuple(untold(NOTICES[:2])) == NOTICES[:2]
    assert tuple(untold(NOTICES)) == (NOTICES[0], NOTICES[2])
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    assert tuple(untold(NOTICES)) == NOTICES


def test_where_nothing_can_be_remembered_it_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert tuple(untold(NOTICES)) == NOTICES
