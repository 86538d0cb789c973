"""Commands that are told to end: one line, the code of the signal, and nothing left of what they had begun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import pytest

from megatron_run.errors import ExitCode
from megatron_run_cli.main import main
from megatron_run_cli.termination import Terminated, ending_in_order
from tests.support.command_tree import every_command
from tests.support.commands import COMMAND, free_port, world_of_two
from tests.support.commands import started as running
from tests.support.processes import alive, on_signals, wait_until

_TEXTS = ("a.jsonl", "--tokenizer", "bytes")
#: Commands that begin processes of their own, by what follows ``megatron-run``, and what shows that they work.
SLOW = {
    "clean": (("data", "clean", *_TEXTS, "--out", "out.jsonl", "--min-tokens", "1"), ".out.jsonl.*.tmp"),
    "prepare": (("data", "prepare", *_TEXTS, "--out", "out"), "out.*/*.part"),
}
WORKERS = 2


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 60 MB, which take any machine seconds."""
    folder = tmp_path_factory.mktemp("texts")
    with (folder / "a.jsonl").open("w", encoding="utf-8") as file:
        for number in range(30_000):
            file.write(
                json.dumps({"text": " ".join(f"word{number * 7919 % 9973 + place}" for place in range(200))}) + "\n"
            )
    return folder


def children(pid: int) -> list[int]:
    """The processes whose parent is ``pid``."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text(encoding="ascii").split()]


@contextmanager
def started(name: str, texts: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    words, begun = SLOW[name]
    (folder / "a.jsonl").symlink_to(texts / "a.jsonl")
    command = [sys.executable, "-m", "megatron_run_cli", *words, "--workers", str(WORKERS)]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            wait_until(lambda: len(children(process.pid)) >= WORKERS and any(folder.glob(begun)), 60.0)
            yield process, children(process.pid)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("prepare", signal.SIGINT),
        ("prepare", signal.SIGTERM),
        ("prepare", signal.SIGKILL),
        ("clean", signal.SIGTERM),  # which has a file of its own to remove, and the same workers
        pytest.param("clean", signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param("clean", signal.SIGKILL, marks=pytest.mark.nightly),
    ],
)
def test_a_command_ends_with_its_processes(name: str, number: signal.Signals, texts: Path, tmp_path: Path) -> None:
    with started(name, texts, tmp_path) as (process, workers):
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal sends Ctrl-C
        else:
            process.send_signal(number)
        assert process.wait(30) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
        wait_until(lambda: not any(map(alive, workers)), 10.0)
        assert process.stderr is not None
        said = [line for line in process.stderr.read().split("\n") if line.startswith(("Traceback", "megatron-run:"))]
    if number != signal.SIGKILL:
        how = "; the same command goes on where it stopped" if name == "prepare" else ""
        assert said == [f"megatron-run: {'interrupted' if number == signal.SIGINT else 'stopped by SIGTERM'}{how}"]
        assert not list(tmp_path.glob(".*"))
    assert not [path for path in tmp_path.glob("out*") if path.is_file()]


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), ExitCode.SIGINT), (click.Abort(), ExitCode.SIGINT), (Terminated(15), ExitCode.SIGTERM)],
    ids=["Ctrl-C", "abort", "SIGTERM"],
)
@pytest.mark.parametrize(
    "group", [None, *(words[0] for words, each in every_command() if len(words) == 1 and hasattr(each, "commands"))]
)
def test_every_command_says_in_one_line_that_it_was_ended(
    error: BaseException,
    code: ExitCode,
    group: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ended(self: click.Command, ctx: click.Context) -> None:
        raise error

    monkeypatch.setattr(click.Command, "invoke", ended)
    words = [name for name in (group,) if name] or ["doctor"]
    monkeypatch.setattr(type(dict(every_command())[(words[0],)]), "invoke", ended)
    assert main(words) == code
    assert len(capsys.readouterr().err.strip().split("\n")) == 1


#: ``NAME GRACE``: a command of that name, whose main thread waits in C for a mutex that it has, as no signal ends it.
WAITING = """
import ctypes, sys
from megatron_run_cli import termination
from megatron_run_cli.main import main, program

name, grace = sys.argv[1:]
termination._Deadline.GRACE = float(grace)

@program.command(name)
def wait():
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("ready", flush=True)
    lock(mutex)

sys.exit(main([name]))
"""
NEVER = "3600"


@pytest.mark.parametrize(
    ("name", "variables", "grace", "numbers", "code", "line"),
    [
        ("wait", {}, "0.1", [signal.SIGHUP], 143, "megatron-run: stopped by SIGHUP\n"),
        ("wait", {}, NEVER, [signal.SIGTERM, signal.SIGHUP], 143, "megatron-run: stopped by SIGTERM\n"),
        *(
            (name, {}, "0.1", [signal.SIGTERM], 143, "megatron-run: stopped by SIGTERM\n")
            for name in ("wait", "generate", "eval", "train", "finetune")
        ),
        ("train", {"LOCAL_RANK": "0"}, NEVER, [signal.SIGTERM], -signal.SIGTERM, ""),
        ("finetune", {"SLURM_PROCID": "1"}, NEVER, [signal.SIGTERM], -signal.SIGTERM, ""),
    ],
)
def test_a_main_thread_that_waits_in_c_ends_within_its_grace_or_at_a_second_signal_and_a_rank_at_once(
    name: str,
    variables: dict[str, str],
    grace: str,
    numbers: list[signal.Signals],
    code: int,
    line: str,
    tmp_path: Path,
) -> None:
    with (
        on_signals(signal.SIG_DFL, *numbers),
        running((sys.executable, "-c", WAITING, name, grace), tmp_path, **variables) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in numbers:
            process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, line)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_rank_that_waits_for_the_others_ends_by_the_signal(tmp_path: Path) -> None:
    """torchrun would otherwise wait for it, and then say that it was killed."""
    port = free_port()
    with running((*COMMAND, "preset:tiny"), tmp_path, **world_of_two(0, port)) as rank:
        wait_until(lambda: listens(port), 60.0)
        rank.send_signal(signal.SIGTERM)
        _, err = rank.communicate(timeout=30)
    assert (rank.returncode, err) == (-signal.SIGTERM, "")


#: A command whose ranks take longer to end than its own grace is: their launcher's handlers stand, and it waits.
LAUNCHING = """
import os, signal, sys, time
from megatron_run_cli import termination
from megatron_run_cli.main import main, program
from megatron_run_engine.launch.signals import caught_signals

termination._Deadline.GRACE = termination._Deadline.AT_ONCE = 0.01

@program.command("eval")
def launch():
    with caught_signals(signal.SIGTERM) as caught:
        os.kill(os.getpid(), signal.SIGTERM)
        bell = next(thread for thread in termination.threading.enumerate() if thread.name == "signals")
        bell.join(0.5)
        print(len(caught), bell.is_alive())

sys.exit(main(["eval"]))
"""


def test_a_command_leaves_signals_to_the_launcher_of_its_ranks(tmp_path: Path) -> None:
    with running((sys.executable, "-c", LAUNCHING), tmp_path) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "1 True\n", "")


def test_what_a_command_sets_of_signals_is_as_before_when_it_ends() -> None:
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with on_signals(signal.SIG_DFL, *numbers):
        with pytest.raises(Terminated, match="stopped by SIGHUP"), ending_in_order():
            os.kill(os.getpid(), signal.SIGHUP)
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_DFL] * 2
    with on_signals(signal.SIG_IGN, signal.SIGHUP), ending_in_order():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert "signals" not in [thread.name for thread in threading.enumerate()]
