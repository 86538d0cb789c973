"""A run goes on with the words that its weights were trained with, at the size that they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megatron_run.errors import CheckpointError, DataError
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


def test_the_same_words_in_another_file_go_on(sets: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    (tmp_path / "tokenizer.json").rename(tmp_path / "moved" / "tokenizer.json")
    moved = {**sets, "data.tokenizer": str(tmp_path / "moved" / "tokenizer.json")}
    assert attempt(tmp_path / "run", moved, allow_change=("data.tokenizer",)).first == 3
