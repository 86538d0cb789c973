"""``megatron-run generate --chat``: turns as words, lines and at a terminal, what is printed, and what is refused."""

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
from megatron_run_inference.conversation import Conversation
from megatron_run_inference.writing import Writing
from tests.support.small_models import GPT2, saved_network

Output = pytest.CaptureFixture[str]
TEXT = ("--plugin", "data=text")
SYSTEM = "kind"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a saved step 7, of a model that reads bytes, and a template beside it."""
    folder = tmp_path_factory.mktemp("chat") / "run"
    saved_network(folder, {**GPT2, "vocab_size": 257, "init_std": 0.2})
    (folder.parent / "t.jinja").write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    return folder


def words(run: Path, *more: str) -> list[str]:
    template = str(run.parent / "t.jinja")
    few = ("--max-new-tokens", "2", "--top-k", "9")
    return ["generate", str(run), *TEXT, "--chat", "--template", template, *few, *more]


def expected(run: Path, *turns: str, system: str | None = None) -> list[str]:
    template = (run.parent / "t.jinja").read_text()
    writing = Writing(max_new_tokens=2, top_k=9)
    talk = Conversation(load(run, sets=["data.use=text"]), writing, system, template)
    return [str(talk.ask(turn).text) for turn in turns]


def test_words_are_turns_of_one_conversation(run: Path, capsys: Output) -> None:
    assert main(words(run, "--system", SYSTEM, "a", "b")) == 0
    said = capsys.readouterr()
    assert said.out == "\n---\n".join(expected(run, "a", "b", system=SYSTEM)) + "\n"
    assert said.err.count("the answer is cut by max_new_tokens=2") == 2
    assert expected(run, "a", "b")[1] != expected(run, "b")[0]


def test_lines_of_standard_input_are_turns(run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n\nb\n"))
    assert main(words(run)) == 0
    assert capsys.readouterr().out == "\n---\n".join(expected(run, "a", "b")) + "\n"


def test_a_piped_talk_ends_at_a_turn_that_cannot_be_answered_and_names_it(
    run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"a\n\n{'b' * 17}\nc\n"))
    assert main(words(run)) == 2
    said = capsys.readouterr()
    assert said.out.startswith(expected(run, "a")[0])
    *_, line = said.err.splitlines()
    assert line.startswith("megatron-run: a prompt is too long: 18 tokens")
    assert "(from turn 2)" in line
    assert "left out" not in said.err


def test_a_byte_that_is_no_text_is_told_by_its_place(
    run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = io.TextIOWrapper(io.BytesIO(b"a\n\xc3\xa9\xff\n"), "utf-8", "surrogateescape")
    monkeypatch.setattr(sys, "stdin", typed)
    assert main(words(run)) == 5
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("megatron-run: standard input is no text: byte 3 of line 2 is not UTF-8")


def test_json_is_a_line_an_answer(run: Path, capsys: Output) -> None:
    assert main(words(run, "--json", "a", "b")) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["prompt"], line["text"]) for line in lines] == list(zip("ab", expected(run, "a", "b"), strict=True))
    assert bytes(lines[1]["prompt_tokens"]) == f"a|{lines[0]['text']}|b|".encode()
    assert (lines[0]["finish"], len(lines[0]["tokens"])) == ("length", 2)


def test_a_terminal_is_a_loop_that_forgets_goes_on_after_mistakes_and_ends(run: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "megatron_run_cli", *words(run)]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        os.write(ours, b"a\n\n/new\na\n" + 40 * b"x" + b"\nb\n/exit\n")
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
            os.close(ours)
    assert process.returncode == 0
    first, second = expected(run, "a", "b")
    assert out.decode() == f"> {first}\n> > > {first}\n> > {second}\n> "
    told = f"megatron-run: {run}/checkpoints/step7, which reads 16 tokens: each line is answered; /new starts anew, "
    assert f"{told}/exit or Ctrl-D ends" in err.decode()
    assert err.count(b"a prompt is too long") == 1


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("--num", "2", "a"), "--chat and --num do not go together: a conversation is text, by one process"),
        (("--tokens", "1"), "--chat and --tokens do not go together"),
        (("--set", "parallel.pipeline=2", "a"), "--chat and several ranks do not go together"),
        ((" ",), "nothing was said to the model; name a PROMPT"),
        (("a" * 17,), "a prompt is too long: 18 tokens, and the model has 16 positions"),
    ],
)
def test_a_mistake_is_one_line(run: Path, more: tuple[str, ...], line: str, capsys: Output) -> None:
    assert main(words(run, *more)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"megatron-run: {line}")
    assert said.count("\n") == 1


def test_options_of_a_conversation_need_one_and_a_model_needs_a_template(run: Path, capsys: Output) -> None:
    assert main(["generate", str(run), *TEXT, "--system", SYSTEM, "a"]) == 2
    assert "--system is for a conversation; add --chat" in capsys.readouterr().err
    assert main(["generate", str(run), *TEXT, "--chat", "a"]) == 5
    said = capsys.readouterr().err
    assert f"{run}/checkpoints/step7 has no chat template: its tokenizer came without one; give one, --template" in said
    assert said.count("\n") == 1
    assert main(["generate", str(run), "--chat", "a"]) == 5
    assert "has no tokenizer" in capsys.readouterr().err
    assert main([*words(run, "a"), "--template", "none.jinja"]) == 5
    assert "none.jinja cannot be read: No such file or directory (from --template)" in capsys.readouterr().err
