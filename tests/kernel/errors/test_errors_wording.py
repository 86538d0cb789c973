"""The wording of messages, beside a search, and before a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.errors import InputError, Problems
from megatron_run.errors.wording import (
    advice,
    did_you_mean,
    duration,
    near_path,
    nearest_divisors,
    nearest_multiples,
    printable,
)


def test_a_name_that_others_chose_neither_reaches_the_terminal_nor_begins_a_line() -> None:
    """Tensors, files and messages in what was downloaded: a title, a cleared screen, a line that looks like ours."""
    forged = "h.\x1b]0;mine\x07\x1b[2J\r\nmegatron-run: all is well\u202e\udc80\x85"
    line = str(InputError("no", why=forged, origin=forged, fix=f"do{forged}"))
    assert line.isprintable()
    assert "h.\\x1b]0;mine\\x07" in line
    assert printable("what differs\n  a: 1\n  b: \x07é") == "what differs\n  a: 1\n  b: \\x07é"
    assert str(Problems([InputError(forged), InputError("b")])).count("\n") == 1


def test_the_part_of_a_path_that_is_missing_is_compared_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    assert near_path(tmp_path / "runs" / "lastest") == "did you mean 'latest'?"
    assert near_path(tmp_path / "run" / "latest") == "did you mean 'runs'?"
    assert near_path(tmp_path / "runs" / "latest") == ""
    assert near_path(tmp_path / "runs" / "zzz") == ""
    (tmp_path / "runs" / "gone").symlink_to("nowhere")
    assert (near_path(tmp_path / "runs" / "gone"), near_path(tmp_path / "runs" / "gnoe")) == ("", ""), "not itself"
    for name in ("list.yaml", "unknown.yaml"):
        (tmp_path / name).touch()
    assert (near_path(tmp_path / "missng.yaml"), near_path(tmp_path / "none.yaml")) == ("", ""), "endings do not count"
    assert near_path(tmp_path / "lists.yml") == "did you mean 'list.yaml'?"


def test_advice_reads_on_after_a_question() -> None:
    assert advice(did_you_mean("interleavd", ["1f1b", "interleaved"]), "installed: 1f1b, interleaved") == (
        "did you mean 'interleaved'? installed: 1f1b, interleaved"
    )
    assert advice(did_you_mean("zzz", ["1f1b"]), "installed: 1f1b") == "installed: 1f1b"
    assert advice("pip install it", "", "installed: 1f1b") == "pip install it; installed: 1f1b"


@pytest.mark.parametrize("number", range(1, 40))
def test_the_nearest_values_are_those_of_a_search(number: int) -> None:
    for other in range(1, 40):
        values = range(1, 100)
        if number % other:
            multiples = [value for value in values if value % other == 0]
            below = [value for value in multiples if value < number][-1:]
            above = [value for value in multiples if value > number][:1]
            assert nearest_multiples(number, other) == " or ".join(map(str, below + above))
            divisors = [value for value in values if number % value == 0]
            nearest = [max(value for value in divisors if value < other)]
            nearest += [value for value in divisors if value > other][:1]
            assert nearest_divisors(number, other) == " or ".join(map(str, nearest))


def test_a_message_brings_a_terminal_nothing_but_text_and_tables() -> None:
    assert str(InputError("a\x1b[2J\nmegatron-run: done\r", why="\ud800 \u202e")) == (
        "a\\x1b[2J\\nmegatron-run: done\\r: \\ud800 \\u202e"
    )
    assert str(InputError("these differ\n  rank 0: x\n  rank 1: y")) == "these differ\n  rank 0: x\n  rank 1: y"
    assert str(InputError("é 漢字")) == "é 漢字"


def test_a_word_of_absurd_length_is_compared_with_none() -> None:
    assert did_you_mean("a" * 100_000, ["a" * 99_999]) == ""
    assert did_you_mean("interleavd", ["a" * 100_000, "interleaved"]) == "did you mean 'interleaved'?"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (8040, "2 h 14 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
