"""Imported folders that were moved: their configurations name the place where they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.config.run_home import IMPORT_HEAD
from megatron_run.config.yaml import yaml_text
from tests.support.resolving import TINY, resolved


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """An import that was made as ``old`` and lies as ``new`` now."""
    old, new = tmp_path / "old", tmp_path / "new"
    (new / "checkpoints" / "step7").mkdir(parents=True)
    data = {"use": "text", "tokenizer": str(old / "tokenizer.json"), "paths": [str(tmp_path / "older")]}
    config = yaml_text({"version": 1, "run": {"init_from": str(old)}, "data": data})
    (new / "config.yaml").write_text(f"{IMPORT_HEAD}somewhere\n{config}")
    return new


def test_a_moved_import_is_read_where_it_is(moved: Path, tmp_path: Path) -> None:
    run = resolved(TINY, str(moved / "config.yaml"))
    assert run.config.run.init_from == moved
    assert run.config.data.options["tokenizer"] == str(moved / "tokenizer.json")
    assert run.config.data.options["paths"] == [str(tmp_path / "older")]
    config = moved / "config.yaml"
    assert f"{config} was moved with its weights: {tmp_path / 'old'} is read as {moved}" in run.notices


def test_what_is_there_or_typed_or_no_import_is_meant(moved: Path, tmp_path: Path) -> None:
    typed = resolved(TINY, str(moved / "config.yaml"), sets={"run.init_from": str(tmp_path / "other")})
    assert typed.config.run.init_from == tmp_path / "other"
    (tmp_path / "old").mkdir()
    assert resolved(TINY, str(moved / "config.yaml")).config.run.init_from == tmp_path / "old"
    (tmp_path / "old").rmdir()
    (moved / "checkpoints" / "step7").rmdir()
    (moved / "checkpoints").rmdir()
    assert resolved(TINY, str(moved / "config.yaml")).config.run.init_from == tmp_path / "old"


def test_a_mistake_in_a_configuration_of_the_users_is_not_taken_for_a_moved_import(
    moved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = moved / "config.yaml"
    config.write_text(config.read_text().partition("\n")[2])
    assert resolved(TINY, str(config)).config.run.init_from == tmp_path / "old"
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "other").mkdir()
    config.write_text(f"{IMPORT_HEAD}somewhere\n" + yaml_text({"version": 1, "run": {"init_from": "~/other"}}))
    assert resolved(TINY, str(config)).config.run.init_from == Path("~/other")
