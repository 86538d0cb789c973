"""What is typed is checked before a model is looked for: every byte of one is read, and a fine-tuning imports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run_cli.main import main


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (
            "eval none --task perplexitty=none.txt",
            (
                "there is no task 'perplexitty'; did you mean 'perplexity'? "
                "write perplexity=FILE, wikitext=FILE, lambada=FILE"
            ),
        ),
        (
            "eval none --task perplexity=validation --task lambada=none.txt",
            "none.txt cannot be read: No such file or directory (from lambada=none.txt)",
        ),
        (
            "eval none --task perplexity=validation --set train.precison=bf16",
            "unknown key train.precison (from --set train.precison); did you mean 'precision'?",
        ),
        ("eval harness none --tasks helaswag", "the harness knows no task 'helaswag'; did you mean 'hellaswag'?"),
        (
            "eval harness none --tasks hellaswag --include nowhere",
            "there is no folder nowhere (from --include)",
        ),
        (
            "eval harness none --tasks hellaswag --set train.precison=bf16",
            "unknown key train.precison (from --set train.precison); did you mean 'precision'?",
        ),
        (
            "generate none --tokens one",
            "'one' is no token id (from --tokens); write ids as in '1 2 3'",
        ),
        (
            "generate none --prompts none.txt",
            "none.txt cannot be read: No such file or directory (from --prompts)",
        ),
        (
            "generate none 1 --chat --tokens",
            (
                "--chat and --tokens do not go together: a conversation is text, by one process, with one answer a "
                "turn; leave out --chat, or --tokens"
            ),
        ),
        (
            "generate none one --chat --template none.jinja",
            "none.jinja cannot be read: No such file or directory (from --template)",
        ),
        (
            "generate none two --set run.devise=cpu",
            "unknown key run.devise (from --set run.devise); did you mean 'device'?",
        ),
        (
            "finetune none --data none.txt --set train.step=3",
            "unknown key train.step (from --set train.step); did you mean 'steps'?",
        ),
    ],
)
def test_a_mistyped_word_is_told_before_the_model_that_is_not_there(
    typed: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if typed.startswith("eval harness"):
        pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    assert main(typed.split()) != 0
    assert capsys.readouterr().err.splitlines()[-1] == f"megatron-run: {line}"
    assert not list(tmp_path.iterdir())
