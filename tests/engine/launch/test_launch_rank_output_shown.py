"""The log of a rank that shows it itself: rank 0 of a world that torchrun or Slurm has made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

#: What precedes the lines of a test, which stand in the block.
SHOWN = """
import logging, os, subprocess, sys, threading
from pathlib import Path
from megatron_run_engine.launch.rank_output import append_line, shown_log

log = Path("logs/attempt-001/rank-00000.log").absolute()
log.parent.mkdir(parents=True)
print("before", flush=True)
before = sys.stdout, sys.stderr
with shown_log(log, ["before"]):
"""
LINES = """
    for number in range(20_000):
        print("line", number)
    print("a warning", file=sys.stderr)
    logging.warning("another")
    print(threading.active_count(), "thread")
    subprocess.run(["echo", "a child's"])
    print("no newline", end="")
    kept = logging.StreamHandler()
with open("another file", "wb") as another:  # has the number that the log had
    kept.stream.write("kept\\n")
print(", after", (sys.stdout, sys.stderr) == before, flush=True)
append_line(log, ", for the log")
"""
#: The last that a process says, and how it ends.
ENDS = {
    "abort": ("os.abort()", -signal.SIGABRT),
    "exit": ("os._exit(4)", 4),
    "kill": ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
}


def shown(folder: Path, lines: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """A process that says ``lines`` to two pipes, whose Python keeps what is not flushed."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-c", SHOWN + lines]
    return subprocess.Popen(words, cwd=folder, stdout=stdout, stderr=subprocess.PIPE, env=environment)


def log(folder: Path) -> str:
    return (folder / "logs" / "attempt-001" / "rank-00000.log").read_text()


def test_each_stream_and_the_log_have_every_line_once_and_no_thread_stands_between(tmp_path: Path) -> None:
    out, err = shown(tmp_path, LINES).communicate(timeout=60)
    lines = "".join(f"line {number}\n" for number in range(20_000))
    assert out.decode() == f"before\n{lines}1 thread\na child's\nno newline, after True\n"
    assert err.decode() == "a warning\nWARNING:root:another\nkept\n"
    assert not (tmp_path / "another file").read_bytes()
    said = f"before\n{lines}a warning\nWARNING:root:another\n1 thread\nno newline"
    assert log(tmp_path) == f"{said}, for the log\n", "what C or a child prints is on the terminal alone"


@pytest.mark.parametrize(("how", "code"), ENDS.values(), ids=ENDS)
def test_what_is_said_before_a_sudden_end_reaches_the_terminal(how: str, code: int, tmp_path: Path) -> None:
    last = f"""
    print("to stdout")
    print("to stderr", file=sys.stderr)
    os.write(2, b"from C")
    {how}
"""
    process = shown(tmp_path, last)
    assert process.communicate(timeout=60) == (b"before\nto stdout\n", b"to stderr\nfrom C")
    assert process.returncode == code
    assert log(tmp_path) == "before\nto stdout\nto stderr\n"


def test_what_is_written_for_a_terminal_knows_that_it_is_one(tmp_path: Path) -> None:
    ours, terminal = os.openpty()
    process = shown(tmp_path, "    print(sys.stdout.isatty(), sys.stderr.isatty(), sys.stdout.fileno())", terminal)
    os.close(terminal)
    seen = b""
    while b"\r\n" not in seen.partition(b"\n")[2] and (piece := os.read(ours, 1 << 16)):
        seen += piece
    process.communicate(timeout=60)
    os.close(ours)
    assert seen == b"before\r\nTrue False 1\r\n"


def test_a_rank_goes_on_when_its_terminal_is_gone(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    process = shown(tmp_path, LINES, writer)
    os.close(writer)
    assert os.read(reader, 7) == b"before\n"
    os.close(reader)
    process.communicate(timeout=60)
    assert log(tmp_path).endswith("line 19999\na warning\nWARNING:root:another\n1 thread\nno newline")
