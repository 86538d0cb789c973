"""What a training says before its ranks start: to a terminal what it does, to who ends it that nothing was saved."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from megatron_run.errors import ExitCode
from megatron_run_cli.main import main
from megatron_run_cli.termination import Terminated
from tests.support.commands import COMMAND

Output = pytest.CaptureFixture[str]
STANDS = b"megatron-run: loading torch and the plugins, checking the run, starting it"
GOES = b"\r\x1b[K"
MISSPELT = ("preset:tiny", "--set", "train.stepz=3")
UNKNOWN = "megatron-run: unknown key train.stepz (from --set train.stepz); did you mean 'steps'?"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setenv("TERM", "xterm")
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def on_a_terminal(*words: str, **variables: str) -> bytes:
    """What a terminal is sent by a command, which writes all of it there."""
    ours, terminal = pty.openpty()
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, env={**os.environ, **variables}
    ) as process:
        os.close(terminal)
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:  # nobody writes there any more
            pass
        finally:
            process.kill()
            os.close(ours)
    return shown


@pytest.mark.parametrize(
    ("more", "variables", "before"),
    [
        ((), {}, STANDS + GOES),
        (("--quiet",), {}, b""),
        ((), {"LOCAL_RANK": "0", "SLURM_PROCID": "0"}, b""),  # ranks share a terminal
        ((), {"TERM": "dumb"}, b""),
    ],
)
def test_a_terminal_shows_what_is_done_until_there_is_more_to_say(
    more: tuple[str, ...], variables: dict[str, str], before: bytes
) -> None:
    shown = on_a_terminal(*COMMAND, *MISSPELT, "--launch", "local", *more, **variables)
    assert shown == before + UNKNOWN.encode() + b"\r\n"


@pytest.mark.parametrize("more", [(), ("--quiet",)])
def test_whoever_is_no_terminal_is_told_the_mistake_alone(more: tuple[str, ...]) -> None:
    done = subprocess.run(
        [*COMMAND, *MISSPELT, *more], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("", f"{UNKNOWN}\n")


@pytest.mark.parametrize(
    "prints",
    [
        "print('more', flush=True)",
        "print('more', file=sys.stderr)",
        "terminal_writer()(b'more\\n')",
        "tell('more')",
    ],
)
def test_the_line_goes_before_anything_else_and_once(prints: str) -> None:
    code = f"""
import sys
from megatron_run_cli.output import tell
from megatron_run_cli.streams import open_streams, stand
from megatron_run_engine.launch.rank_output import terminal_writer

open_streams()
stand("this stands")
{prints}
print("the end", flush=True)
"""
    before, _, after = on_a_terminal(sys.executable, "-c", code).partition(GOES)
    assert before == b"this stands"
    assert after.endswith(b"\r\nthe end\r\n")
    assert GOES not in after


def test_the_line_goes_where_a_main_thread_that_waits_in_c_is_ended() -> None:
    code = """
import socket
from megatron_run_cli.streams import open_streams, stand
from megatron_run_cli.termination import _Deadline

open_streams()
stand("this stands")
deadline = _Deadline([15])
deadline.AT_ONCE, deadline.ear, deadline._hear = 0.0, socket.socket(), lambda: 15
deadline.listen()
"""
    shown = on_a_terminal(sys.executable, "-c", code)
    assert shown == b"this stands" + GOES + b"megatron-run: stopped by SIGTERM\r\n"


def test_a_line_is_no_longer_than_the_terminal_is_wide() -> None:
    """What a terminal has wrapped cannot be erased."""
    code = """
from megatron_run_cli.streams import erase, open_streams, stand

open_streams()
stand(100 * "x")
erase()
"""
    assert on_a_terminal(sys.executable, "-c", code) == 79 * b"x" + GOES


@pytest.mark.parametrize(
    ("end", "code", "word"),
    [(KeyboardInterrupt(), ExitCode.SIGINT, "interrupted"), (Terminated(15), ExitCode.SIGTERM, "stopped by SIGTERM")],
)
def test_who_ends_it_reads_that_nothing_was_saved(
    end: BaseException, code: ExitCode, word: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object, **__: object) -> NoReturn:
        raise end

    monkeypatch.setattr("megatron_run.planning.resolve", ended)
    assert main(["preset:tiny"]) == code
    last = capsys.readouterr().err.splitlines()[-1]  # click writes an empty line after ^C
    assert last == f"megatron-run: {word}; no step has begun, and nothing was saved"


def test_a_launcher_that_did_not_start_it_is_told_alone(capsys: Output) -> None:
    assert main(["--launch", "torchrun", "preset:tiny"]) == ExitCode.INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert "this process was not started by torchrun" in line
