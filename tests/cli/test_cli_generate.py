"""``megatron-run generate``: words, standard input, files, what is printed; what models write is tested beside them."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_run import load
from megatron_run_cli.main import main
from tests.support.forked import forked_command
from tests.support.small_models import GPT2, LENGTH, saved_network

Output = pytest.CaptureFixture[str]
#: A byte is a token, and so is the end of a text.
SIZES = {**GPT2, "vocab_size": 257, "init_std": 0.2}
TEXT = ("--plugin", "data=text")
FEW = ("--max-new-tokens", "6")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a saved step 7."""
    folder = tmp_path_factory.mktemp("generate") / "run"
    saved_network(folder, SIZES)
    return folder


def told(capsys: Output, *words: object, code: int = 0) -> str:
    assert main(["generate", *map(str, words)]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def expected(run: Path, *prompts: str, **options: object) -> list[str]:
    return list(map(str, load(run, sets=["data.use=text"]).generate(prompts, max_new_tokens=6, **options)))


def test_one_text_is_printed_as_it_comes(run: Path, capsys: Output) -> None:
    assert told(capsys, run, "ab", *TEXT, *FEW) == f"{expected(run, 'ab')[0]}\n"
    options = ("--temperature", 0, "--repetition-penalty", 1.4)
    said = told(capsys, run / "checkpoints" / "step7", "ab", *TEXT, *FEW, *options)
    assert said == f"{expected(run, 'ab', temperature=0, repetition_penalty=1.4)[0]}\n"


def test_several_texts_stand_apart_and_a_file_adds_prompts(run: Path, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "more.txt").write_text("cd\n\nefg\n", encoding="utf-8")
    (tmp_path / "more.json").write_text('["cd", "efg"]', encoding="utf-8")
    texts = expected(run, "ab", "cd", "efg", num=2, seed=3, top_k=9, top_p=0.9)
    options = (*TEXT, *FEW, "--num", 2, "--seed", 3, "--top-k", 9, "--top-p", 0.9)
    for name in ("more.txt", "more.json"):
        assert told(capsys, run, "ab", "--prompts", tmp_path / name, *options) == "\n---\n".join(texts) + "\n"


def test_json_has_texts_and_tokens(run: Path, capsys: Output) -> None:
    said = json.loads(told(capsys, run, "ab", *TEXT, *FEW, "--num", 2, "--json"))
    assert (said["model"], said["step"]) == (str(run / "checkpoints" / "step7"), 7)
    first, second = said["texts"]
    assert (first["prompt"], first["prompt_tokens"], first["sample"]) == ("ab", [97, 98], 0)
    assert (second["sample"], second["finish"], len(second["tokens"])) == (1, "length", 6)
    assert first["prompt"] + first["text"] == expected(run, "ab")[0]


def test_token_ids_need_no_tokenizer(run: Path, capsys: Output) -> None:
    texts = [text.ids for text in load(run).generate([[1, 2], [3]], max_new_tokens=6)]
    assert told(capsys, run, "1 2", "3", "--tokens", *FEW) == "\n---\n".join(texts) + "\n"


def test_standard_input_is_the_prompt_where_none_is_given(
    run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert told(capsys, run, *TEXT, *FEW) == f"{expected(run, 'a' + chr(10) + 'b')[0]}\n"


def test_without_caches_the_text_is_the_same(run: Path, capsys: Output) -> None:
    assert told(capsys, run, "ab", *TEXT, *FEW, "--no-cache") == told(capsys, run, "ab", *TEXT, *FEW)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (
            ("{run}", "ab"),
            5,
            "{run}/checkpoints/step7 has no tokenizer: only its weights lie there; name its tokenizer",
        ),
        (("{run}", "ab", *TEXT, "--top-p", "2"), 2, "top_p=2.0: it must be above 0 and at most 1"),
        (("{run}", "a" * (LENGTH + 1), *TEXT), 2, f"a prompt is too long: {LENGTH + 1} tokens, and the model has"),
        (("{run}", "1 x", "--tokens"), 2, "'x' is no token id (from --tokens); write ids as in '1 2 3'"),
        (("{run}", "999", "--tokens"), 2, "token 999 is outside the model's vocabulary of 257"),
        (("{run}", "--prompts", "{run}/none.txt", *TEXT), 5, "{run}/none.txt cannot be read: No such file or d"),
        (("{run}", "a", "--step", "8"), 5, "there is no checkpoint {run}/checkpoints/step8; saved steps: 7"),
        (("a b", "{run}"), 2, "the prompt 'a b' is in the place of the model; type: megatron-run generate {run} 'a b'"),
        (("{run}", "caf\udce9", *TEXT), 5, "the text has no character at place 3: there is a byte that is not UTF-8"),
        (("{run}/..", "a"), 5, "there is no model in {run}/..: no step is saved there"),
        (("{run}", "a", "--set", "model.vocab_size=99", *TEXT), 2, "model.vocab_size=99 is smaller than the data's"),
        (("{run}", "a", "--set", "model.hidden_size=48"), 5, "the weights in {run}/checkpoints/step7 are of another"),
    ],
)
def test_a_mistake_is_one_line(run: Path, words: tuple[str, ...], code: int, line: str, capsys: Output) -> None:
    said = told(capsys, *(word.format(run=run) for word in words), code=code)
    assert said.startswith(f"megatron-run: {line.format(run=run)}")
    assert said.count("\n") == 1


def test_a_misspelt_file_of_prompts_is_told_by_its_name(run: Path, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "prompts.txt").touch()
    line = told(capsys, run, "--prompts", tmp_path / "prompt.txt", *TEXT, code=5)
    assert line.endswith("cannot be read: No such file or directory (from --prompts); did you mean 'prompts.txt'?\n")


def test_lines_at_a_terminal_are_continued_until_its_end(run: Path) -> None:
    command = [sys.executable, "-m", "megatron_run_cli", "generate", str(run), *TEXT, *FEW]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        os.write(ours, b"ab\n/new\nab\n\x04")
        out, err = process.communicate(timeout=120)
        os.close(ours)
    assert process.returncode == 0
    assert b"/new starts anew" in err
    continued = expected(run, "ab")[0].removeprefix("ab").encode()
    assert out.count(continued) == 2


@pytest.mark.multiproc
def test_ranks_write_the_same_and_their_mistakes_are_one_line(run: Path, tmp_path: Path) -> None:
    words = ("generate", str(run), *TEXT, *FEW, "--set", "parallel.pipeline=2")
    done = forked_command((*words, "ab"), tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{expected(run, 'ab')[0]}\n"), done.stderr
    wrong = forked_command((*words, "a" * (LENGTH + 1)), tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[-1].startswith(f"megatron-run: a prompt is too long: {LENGTH + 1} tokens")
    assert "log:" not in wrong.stderr
