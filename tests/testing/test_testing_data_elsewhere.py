"""A function runs in another process with another environment, and however that ends is told."""

from __future__ import annotations

import os
import time

import pytest

from megatron_run_testing import CheckFailed
from megatron_run_testing.data.elsewhere import NotSendableError, another_rank, run_elsewhere


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def hash_of(text: str) -> int:
    return hash(text)


def end(code: int) -> None:
    os._exit(code)


def test_the_environment_is_another_one_there_and_as_before_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert run_elsewhere(variables, another_rank(), "RANK", "LOCAL_RANK", "WORLD_SIZE") == ["2", "2", "4"]
    assert variables("RANK", "WORLD_SIZE") == ["3", None]


def test_a_text_has_another_hash_there() -> None:
    assert run_elsewhere(hash_of, another_rank(), "a text") != hash_of("a text")


def test_what_is_raised_there_is_told() -> None:
    with pytest.raises(CheckFailed, match=r"^in a process with RANK=1: ValueError: could not convert .*'one'"):
        run_elsewhere(float, {"RANK": "1"}, "one")


def test_a_process_that_ends_without_an_answer_is_told() -> None:
    with pytest.raises(CheckFailed, match="with RANK=1 it ends the process"):
        run_elsewhere(end, {"RANK": "1"}, 3)


def test_a_process_without_an_answer_is_ended() -> None:
    began = time.monotonic()
    with pytest.raises(CheckFailed, match=r"it takes longer than 0\.5 s"):
        run_elsewhere(time.sleep, {}, 60, timeout=0.5)
    assert time.monotonic() - began < 30


def test_what_has_no_name_cannot_be_sent() -> None:
    with pytest.raises(NotSendableError, match="cannot be sent to another process: "):
        run_elsewhere(lambda: None, {})
