"""A run goes on with the words that its weights were trained with, at the size that they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megatron_run.errors import CheckpointError, DataError
from megatron_run.planning import load_config
from megatron_run_engine.training.state.init_from import check_source
from tests.support.resuming import SMALL, attempt

NAMES = "abcdefghijkl"


def write_tokenizer(file: Path, names: str) -> None:
    """A word for each letter of ``names``, in their order."""
    words = {word: index for index, word in enumerate((*names, "[UNK]"))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(file))


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, Any]:
    """Of a run that has trained two steps of four on letters."""
    (tmp_path / "letters.txt").write_text(" ".join(NAMES) * 400)
    write_tokenizer(tmp_path / "tokenizer.json", NAMES)
    values = {key: value for key, value in SMALL.items() if not key.startswith("data.")}
    values |= {"data.use": "text", "data.paths": [str(tmp_path / "letters.txt")]}
    values |= {"data.tokenizer": str(tmp_path / "tokenizer.json"), "train.steps": 4, "checkpoint.interval": 2}
    attempt(tmp_path / "run", values, stop_after=2)
    return values


@pytest.mark.parametrize("names", [NAMES[:9], NAMES + "mnop", NAMES[::-1]], ids=["fewer", "more", "other order"])
def test_a_tokenizer_that_was_made_anew_at_the_same_path_is_refused(
    names: str, sets: dict[str, Any], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", names)
    with pytest.raises(DataError, match=r"another tokenizer than the weights in .*--allow-change data\.tokenizer"):
        attempt(tmp_path / "run", sets, allow_change=("data",))


def test_weights_are_never_cut_nor_stretched_to_another_vocabulary(sets: dict[str, Any], tmp_path: Path) -> None:
    for names in (NAMES[:9], NAMES + "mnop"):
        write_tokenizer(tmp_path / "tokenizer.json", names)
        with pytest.raises(CheckpointError, match=r"embedding\S* is \[\d+, 16\] there, \[\d+, 16\] here"):
            attempt(tmp_path / "run", sets, allow_change=("data.tokenizer",))


def test_as_many_other_words_are_trained_on_where_that_is_allowed(sets: dict[str, Any], tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", NAMES[::-1])
    assert attempt(tmp_path / "run", sets, allow_change=("data.tokenizer",)).first == 3


@pytest.mark.parametrize("name", ["data.tokenizer", "data.split", "train.lr"])
def test_another_permission_lets_no_other_text_in(name: str, sets: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text(" ".join(NAMES) * 300)
    with pytest.raises(DataError, match=r"the training data is not what it was.*--allow-change data,"):
        attempt(tmp_path / "run", sets, allow_change=(name,))


def test_the_same_words_in_another_file_go_on(sets: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    (tmp_path / "tokenizer.json").rename(tmp_path / "moved" / "tokenizer.json")
    moved = {**sets, "data.tokenizer": str(tmp_path / "moved" / "tokenizer.json")}
    assert attempt(tmp_path / "run", moved, allow_change=("data.tokenizer",)).first == 3


def allowed(run: Path, name: str, step: int | None) -> None:
    """Let ``run`` have an attempt that was allowed to change ``name``, and was killed before it saved."""
    entry = {"changes": {}, "allow_change": [name], "allow_plugin_change": []} | (
        {} if step is None else {"step": step}
    )
    (run / "run.json").write_text(json.dumps({"v": 1, "id": "0" * 32, "attempts": [{}, entry]}))


def test_what_an_attempt_was_allowed_that_saved_nothing_needs_no_word_again(
    sets: dict[str, Any], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", NAMES[::-1])
    for step in (None, 1):  # it never began, or has saved the step from which the run now goes on
        allowed(tmp_path / "run", "data.tokenizer", step)
        with pytest.raises(DataError, match="another tokenizer"):
            attempt(tmp_path / "run", sets)
    allowed(tmp_path / "run", "data.tokenizer", 2)
    assert attempt(tmp_path / "run", sets).first == 3


def test_a_text_that_was_edited_with_permission_needs_no_word_again(sets: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text(" ".join(reversed(NAMES)) * 400)
    with pytest.raises(DataError, match="the training data is not what it was"):
        attempt(tmp_path / "run", sets)
    allowed(tmp_path / "run", "data", 2)
    assert attempt(tmp_path / "run", sets).first == 3


@pytest.mark.parametrize("start", ["run.init_from", "run.branch_from"])
def test_a_start_from_another_run_with_other_words_needs_no_word_again_before_it_has_saved(
    start: str, sets: dict[str, Any], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", NAMES[::-1])
    new = tmp_path / "new"
    values = {**sets, start: str(tmp_path / "run"), "run.folder": new}
    with pytest.raises(DataError, match="another tokenizer"):
        check_source(load_config("preset:tiny", sets=values)) if start == "run.init_from" else attempt(new, values)
    new.mkdir(exist_ok=True)
    allowed(new, "data.tokenizer", 0)
    check_source(load_config("preset:tiny", sets=values))
    assert attempt(new, values).first == (1 if start == "run.init_from" else 3)
    write_tokenizer(tmp_path / "tokenizer.json", NAMES)
    with pytest.raises(DataError, match="another tokenizer"):  # than its own step was saved with
        attempt(new, values)
