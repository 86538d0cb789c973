"""``megatron-run data``: from texts of one's own to a dataset, and what is kept."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_run.errors import ExitCode
from megatron_run_cli import progress
from megatron_run_cli.main import main

Output = pytest.CaptureFixture[str]

TEXTS = [f"text {number} of many, with {number * number} in it" for number in range(40)]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def as_json(capsys: Output, *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("source")
def test_texts_are_prepared_shown_and_given_back(capsys: Output) -> None:
    assert main(["data", "train-tokenizer", "mine.jsonl", "--vocab-size", "300", "--out", "t.json"]) == 0
    capsys.readouterr()
    words = ["data", "prepare", "mine.jsonl", "--out", "d/set", "--tokenizer", "t.json", "--workers", "1"]
    assert as_json(capsys, *words, "--dry-run")["documents"] == 40
    assert not Path("d").exists()
    totals = as_json(capsys, *words)
    shown = as_json(capsys, "data", "inspect", "d/set", "--samples", "2", "--check")
    assert (shown["documents"], shown["tokens"]) == (totals["documents"], totals["tokens"])
    assert [sample["text"] for sample in shown["samples"]] == [TEXTS[0], TEXTS[-1]]
    assert 0 <= shown["ids"][0] <= shown["ids"][1] < 300
    assert as_json(capsys, "data", "convert", "d/set", "back.jsonl") == {"documents": 40}
    assert [json.loads(line)["text"] for line in Path("back.jsonl").read_text().splitlines()] == TEXTS


@pytest.mark.usefixtures("source")
def test_what_prepare_prints_is_what_to_type_next(capsys: Output) -> None:
    assert main(["data", "prepare", "mine.jsonl", "--out", "set", "--tokenizer", "bytes", "--workers", "1"]) == 0
    assert "megatron-run --plugin data=indexed,paths=set,tokenizer=bytes\n" in capsys.readouterr().out


def test_one_document_is_trained_on_whole_as_prepare_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Documents are not cut, and the default shares leave none for validation."""
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("a line of it\n\n" * 200)
    prepare = ["data", "prepare", "one.txt", "--tokenizer", "bytes", "--workers", "1", "--out"]
    assert main([*prepare, "whole"]) == 0
    told = capsys.readouterr().out.splitlines()
    line = next(line for line in told if line.startswith("train: megatron-run "))
    assert "--separator" in line
    words = ["preset:tiny", *shlex.split(line, comments=True)[2:]]
    assert words[-1] == "data.split=1,0,0"
    assert main([*words, "--dry-run"]) == 0
    capsys.readouterr()
    assert main([*words[:-2], "--dry-run"]) == ExitCode.DATA
    assert "data prepare --separator), or set data.split=1,0,0" in capsys.readouterr().err
    assert main([*prepare, "many", "--separator", r"\n\n"]) == 0
    assert "tokenizer=bytes\n" in capsys.readouterr().out


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (
            ["prepare", "mine.jsonl", "--out", "set", "--tokenizer", "bytes", "--json-key", "txt"],
            "line 1",
            ExitCode.DATA,
        ),
        (["prepare", "none.jsonl", "--out", "set", "--tokenizer", "bytes"], "does not exist", ExitCode.DATA),
        (
            ["prepare", "mine.jsonl", "--out", "set", "--tokenizer", "none"],
            "none does not exist (from --tokenizer)",
            ExitCode.DATA,
        ),
        (["inspect", "set"], "does not exist", ExitCode.DATA),
        (["cache", "--days", "3"], "--days goes with --prune", ExitCode.INPUT),
        (["convert", "set", "mine.jsonl"], "exists", ExitCode.INPUT),
    ],
)
def test_a_mistake_is_one_line(capsys: Output, words: list[str], said: str, code: ExitCode) -> None:
    assert main(["data", *words]) == code
    out, err = capsys.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert not out


def test_the_cache_is_listed_and_pruned(
    tmp_path: Path, source: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_run_engine.builtin.data.text import TextOptions, megatron_run_create_data

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "large.txt").write_text("a line of text\n" * 80_000)
    megatron_run_create_data(TextOptions(paths=("large.txt",))).dataset("train", 8, 0)
    (entry,) = as_json(capsys, "data", "cache")["entries"]
    assert entry["text"] == str(tmp_path / "large.txt")
    assert entry["size"] == Path(entry["path"]).stat().st_size
    assert len(as_json(capsys, "data", "cache", "--prune")["entries"]) == 1
    assert main(["data", "cache"]) == 0
    assert "large.txt" in capsys.readouterr().out
    assert as_json(capsys, "data", "cache", "--prune", "--days", "0")["entries"] == []


@pytest.mark.usefixtures("source")
def test_prepare_says_now_and_then_how_far_it_is_where_nobody_watches(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["data", "prepare", "mine.jsonl", "--out", "d/set", "--tokenizer", "bytes", "--workers", "1"]
    assert main(words) == 0
    assert "MB" not in capsys.readouterr().err  # it was quick
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    assert main([*words, "--overwrite"]) == 0
    assert "tokens; about 0 s left" in capsys.readouterr().err
