"""The log of a rank that shows it itself: rank 0 of a world that torchrun or Slurm has made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SHOWN = """
import os, subprocess, sys
from pathlib import Path
from megatron_run_engine.launch.rank_output import shown_log

log = Path("logs/attempt-001/rank-00000.log").absolute()
log.parent.mkdir(parents=True)
print("before", flush=True)
with shown_log(log, ["before"]):
    for number in range(20_000):
        print("line", number)
    sys.stdout.flush()
    print("colours", os.environ.get("FORCE_COLOR"), file=sys.stderr)
    subprocess.run(["echo", "a child's"])
    print("not flushed", end="")
print(", in the log alone", os.environ.get("FORCE_COLOR"), flush=True)
"""


def shown(folder: Path, stdout: int) -> subprocess.Popen[bytes]:
    clean = {name: text for name, text in os.environ.items() if name != "FORCE_COLOR"}
    return subprocess.Popen([sys.executable, "-c", SHOWN], cwd=folder, stdout=stdout, env=clean)


def log(folder: Path) -> str:
    return (folder / "logs" / "attempt-001" / "rank-00000.log").read_text()


def test_the_log_has_every_line_and_the_terminal_each_of_them_once(tmp_path: Path) -> None:
    out, _ = shown(tmp_path, subprocess.PIPE).communicate(timeout=60)
    lines = "".join(f"line {number}\n" for number in range(20_000))
    expected = f"before\n{lines}colours None\na child's\nnot flushed"
    assert out.decode() == expected
    assert log(tmp_path) == f"{expected}, in the log alone None\n"


def test_what_is_written_for_a_terminal_knows_that_it_is_one(tmp_path: Path) -> None:
    ours, terminal = os.openpty()
    process = shown(tmp_path, terminal)
    os.close(terminal)
    seen = b""
    while b"not flushed" not in seen and (piece := os.read(ours, 1 << 16)):
        seen += piece
    assert process.wait(60) == 0
    os.close(ours)
    assert seen.startswith(b"before\r\nline 0\r\n")
    assert b"\r\ncolours 1\r\n" in seen
    assert log(tmp_path).endswith("in the log alone None\n"), "the environment is as it was"


def test_a_rank_goes_on_when_its_terminal_is_gone(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    process = shown(tmp_path, writer)
    os.close(writer)
    assert os.read(reader, 7) == b"before\n"
    os.close(reader)
    assert process.wait(60) == 0
    assert "line 19999\n" in log(tmp_path)
