"""A name of the Hugging Face Hub in the place of a folder: nothing is downloaded, and how to get it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

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
def test_a_name_of_the_hub_is_answered_with_the_command_that_gets_it(
    words: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text\n")
    assert main(words.format(name).split()) != 0
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("megatron-run: ")
    assert "nothing is downloaded" in line
    assert f"type: hf download {name} --local-dir {name} (of pip install huggingface_hub)" in line


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
    assert "hf download gpt2 " in from_hub(Path("gpt2"))
