"""The way of a rank's log to the terminal: a slow reader gets all of it, one that takes nothing holds nobody up."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_run_engine.launch.rank_output import Relay, terminal_writer


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "rank-00000.log"
    file.write_bytes(b"".join(b"line %05d\n" % number for number in range(7_000)))
    return file


def test_a_slow_reader_gets_every_line(log: Path) -> None:
    found: list[bytes] = []

    def slow(data: bytes) -> None:
        time.sleep(0.06)
        found.append(data)

    relay = Relay(log, slow, print)
    relay.start()
    relay.finish(within=1.0)
    assert b"".join(found) == log.read_bytes()
    assert len(found) * 0.06 > 1, "a wait of one second would do"


def test_a_reader_that_takes_nothing_holds_nobody_up(log: Path) -> None:
    let_go, pieces = threading.Event(), list[bytes]()

    def stuck(data: bytes) -> None:
        pieces.append(data)
        let_go.wait()

    relay = Relay(log, stuck, print)
    relay.start()
    relay.finish(within=0.5)
    assert log.read_bytes().startswith(b"".join(pieces))
    assert len(pieces) == 1
    let_go.set()


def test_text_for_a_notebook_is_whole_where_a_piece_ends_within_a_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Notebook:
        encoding, said = "utf-8", ""

        def write(self, text: str) -> int:
            self.said += text
            return len(text)

        def flush(self) -> None:
            """Nothing is kept back."""

    text = "é" * 10_000
    (tmp_path / "log").write_bytes(b"." + text.encode())
    shown = Notebook()
    monkeypatch.setattr(sys, "stdout", shown)
    relay = Relay(tmp_path / "log", terminal_writer(), print)
    relay.start()
    relay.finish()
    assert shown.said == "." + text


def full(_: bytes) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("exists", "said"),
    [
        (True, "standard output cannot be written: No space left on device; the run goes on, and prints into {log}"),
        (False, "{log} cannot be read, and is shown no more: No such file or directory; the run goes on"),
    ],
)
def test_a_log_that_cannot_be_read_is_no_fault_of_the_reader(log: Path, exists: bool, said: str) -> None:
    if not exists:
        log.unlink()
    told: list[str] = []
    relay = Relay(log, full, told.append)
    relay.start()
    relay.finish()
    assert told == [said.format(log=log)]


def test_a_line_is_told_from_its_beginning_where_a_bar_was_drawn(tmp_path: Path) -> None:
    """And what is told once all is copied begins a line too; after whole lines none is added."""
    shown: list[bytes] = []
    for drawn, expected in ((b"\rstep 3/20", b"\rstep 3/20\nstopping\n\rstep 4/20\n"), (b"a\n", b"a\nstopping\nb\n")):
        log = tmp_path / "log"
        log.write_bytes(drawn)
        shown.clear()
        copied = threading.Event()

        def show(data: bytes, copied: threading.Event = copied) -> None:
            shown.append(data)
            copied.set()

        relay = Relay(log, show, lambda line: shown.append(f"{line}\n".encode()), bars=True)
        relay.start()
        assert copied.wait(10)
        relay.tell("stopping")
        with log.open("ab") as more:
            more.write(b"\rstep 4/20" if drawn != b"a\n" else b"b\n")
        relay.finish()
        assert b"".join(shown) == expected
