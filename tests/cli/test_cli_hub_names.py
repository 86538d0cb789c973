"""A bare name in the place of a folder: nothing is fetched, and how a model of the Hub is typed is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from megatron_run.errors.wording import from_hub
from megatron_run_cli.main import main

#: Each place where a model's or tokenizer's folder is named.
TAKEN = {
    "finetune": "finetune {} --data text.txt",
    "import": "import {} new",
    "export": "export {} new --to huggingface",
    "generate": "generate {} text",
    "eval": "eval {} --task perplexity=text.txt",
    "init_from": "preset:tiny --set run.init_from={} --dry-run",
    "tokenizer of training": "preset:tiny --plugin data=text,paths=text.txt,tokenizer={} --dry-run",
    "tokenizer of preparation": "data prepare text.txt --out out --tokenizer {}",
}


@pytest.mark.parametrize("words", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2", "Qwen/Qwen2.5-0.5B"])
def test_a_bare_name_is_answered_with_how_it_is_typed(
    words: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text\n")
    assert main(words.format(name).split()) != 0
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("megatron-run: ")
    assert f"if {name} is a model of the Hugging Face Hub, type hf:{name}" in line


@pytest.mark.parametrize(
    "path", ["runs/latest", "here/other", "/elsewhere/model", "tokenizer.json", "a/b/c", "../gpt2", "-x/y", ".hidden"]
)
def test_what_can_be_no_name_of_the_hub_is_not_taken_for_one(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert from_hub(Path(path)) == ""


def test_a_current_folder_that_was_removed_is_no_fault_of_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert "type hf:gpt2" in from_hub(Path("gpt2"))


@pytest.mark.parametrize("words", [TAKEN["export"], TAKEN["init_from"]])
def test_what_wants_a_saved_step_says_how_a_model_of_the_hub_becomes_one(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.format("hf:org/tiny").split()) == ExitCode.DATA
    assert "import it first: megatron-run import hf:org/tiny NEW, then name NEW" in capsys.readouterr().err
