"""The local launcher, with ranks that misbehave on purpose and need no torch."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from megatron_run.errors import ExitCode, InputError
from megatron_run_engine.host.rank_environment import rank_environment
from megatron_run_engine.launch import local
from megatron_run_engine.launch.rank_output import flush_output, terminal_writer
from megatron_run_engine.launch.start import scratch_folder
from megatron_run_engine.launch.watchdog.monitor import is_stopped
from tests.engine.launch.launcher import Launcher, no_process_left
from tests.support.processes import alive, kill_when_begun, process_ids, wait_until

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(60)]
#: Seconds after which a rank that says nothing new hangs.
LIMIT = 1.0


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


def test_every_rank_writes_its_log_and_only_rank_0_is_shown(launcher: Launcher) -> None:
    result = launcher("*:exit 0", size=3)
    assert result.code == ExitCode.DONE
    assert [launcher.log(rank) for rank in range(3)] == [f"rank {rank} prints\n" for rank in range(3)]
    assert b"".join(launcher.shown) == b"rank 0 prints\n"


def test_a_loss_has_its_times_even_where_all_ranks_end_between_two_looks(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_POLL", 2.0)
    lost = launcher("*:exit 9", size=2).lost
    assert lost is not None
    assert lost.died <= lost.detected <= lost.ended
    assert launcher("*:exit 0", size=2).lost is None


def test_what_rank_0_prints_is_shown_while_it_runs(launcher: Launcher) -> None:
    launcher("0:talk")
    assert b"".join(launcher.shown).count(b"\n") == 20
    assert len(launcher.shown) > 3


def test_training_goes_on_when_nobody_reads_standard_output(launcher: Launcher) -> None:
    def broken(data: bytes) -> None:
        raise BrokenPipeError

    assert launcher("0:talk", show=broken).code == ExitCode.DONE
    assert launcher.log(0).endswith("line 19\n")


def test_a_terminal_that_takes_a_few_bytes_at_a_time_gets_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.write
    with (tmp_path / "terminal").open("w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        write = terminal_writer()
        patch.setattr(os, "write", lambda descriptor, data: whole(descriptor, data[:3]))
        write(b"step 12, loss 3.45")
    assert (tmp_path / "terminal").read_bytes() == b"step 12, loss 3.45"


def test_ranks_get_torchruns_variables_and_their_threads(launcher: Launcher) -> None:
    names = "RANK,LOCAL_RANK,WORLD_SIZE,LOCAL_WORLD_SIZE,OMP_NUM_THREADS,MKL_NUM_THREADS,OMP_WAIT_POLICY,FORCE_COLOR"
    changes: dict[str, Any] = {
        "threads": 500,
        "shown": {"FORCE_COLOR": "1"},
        "environment": {"PATH": os.environ["PATH"]},
    }
    launcher(f"*:environment {names}", **changes)
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "500", "MKL_NUM_THREADS": "500"}
    for rank, color in enumerate(("1", None)):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_WAIT_POLICY": "passive", "FORCE_COLOR": color}
        assert eval(launcher.log(rank)) == place | common


@pytest.mark.parametrize("size", [1, 2])
def test_the_allocators_settings_stand_when_a_rank_starts_also_a_single_one(launcher: Launcher, size: int) -> None:
    environment = {"PATH": os.environ["PATH"]}
    launcher("*:environment GLIBC_TUNABLES", size=size, environment=environment)
    expected = {"GLIBC_TUNABLES": rank_environment({}, 1, size, 1).get("GLIBC_TUNABLES")}
    assert [eval(launcher.log(rank)) for rank in range(size)] == [expected] * size


@pytest.mark.parametrize("code", [2, *(pytest.param(each, marks=pytest.mark.nightly) for each in (3, 5, 6)), 7])
def test_a_documented_exit_code_passes_through_with_its_message(launcher: Launcher, code: int) -> None:
    result = launcher("*:wait", f"1:report {code} first no good: try another", grace=0.2)
    assert (result.code, result.message) == (code, f"no good: try another (rank 1, log: {launcher.folder.log(1)})")
    assert launcher.log(1).endswith("megatron-run: no good: try another\n")
    assert no_process_left(launcher)


def test_a_traceback_is_a_bug_named_by_its_last_line(launcher: Launcher) -> None:
    result = launcher("*:wait", "1:raise strange things", grace=0.2)
    assert result.code == ExitCode.BUG
    expected = f"a rank ended with exit code 1: ValueError: strange things (rank 1, log: {launcher.folder.log(1)})"
    assert result.message == expected
    assert "Traceback" in launcher.log(1)


def test_an_unknown_exit_code_is_a_bug(launcher: Launcher) -> None:
    assert launcher("1:exit 9").code == ExitCode.BUG


def test_ranks_that_end_at_their_time_limit_blame_no_rank(launcher: Launcher) -> None:
    result = launcher("*:exit 75")
    assert (result.code, result.message) == (ExitCode.TIME_LIMIT, "stopped by the time limit")


def test_a_killed_rank_is_lost_and_named_with_its_signal(launcher: Launcher) -> None:
    result = launcher("*:wait", "1:kill", grace=0.2)
    assert result.code == ExitCode.RANK_LOST
    assert result.message == f"a rank was killed by SIGKILL (rank 1, log: {launcher.folder.log(1)})"
    assert no_process_left(launcher)


def test_a_peers_complaint_is_never_the_first_cause(launcher: Launcher) -> None:
    """Rank 0 loses its connection at once; rank 1, whose fault it is, says so later."""
    result = launcher("0:report 4 second another rank was lost", "1:report 7 first out of memory")
    assert (result.code, result.message.split(" (")[0]) == (ExitCode.OUT_OF_MEMORY, "out of memory")


def test_a_hanging_rank_is_killed_and_named_when_others_lost_it(launcher: Launcher) -> None:
    start = time.monotonic()
    result = launcher("0:report 4 second another rank was lost", "1:stubborn", grace=0.3)
    assert time.monotonic() - start < 30
    assert result.code == ExitCode.RANK_LOST
    assert result.message.endswith("; rank 1 did not end and was killed")
    assert no_process_left(launcher)


@pytest.mark.parametrize(
    ("number", "line"),
    [  # test_errors_machine_limits has the line of too many files
        pytest.param(errno.EMFILE, "too many files are open: ulimit -n allows", marks=pytest.mark.nightly),
        (errno.ENOSPC, r"the ranks cannot be started: No space left on device: .*; run\.folder and TMPDIR must"),
        pytest.param(errno.EROFS, "the ranks cannot be started: Read-only file system", marks=pytest.mark.nightly),
    ],
    ids=["files", "space", "read-only"],
)
def test_what_the_machine_refuses_a_launcher_is_one_line_whatever_it_refuses(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, number: int, line: str
) -> None:
    """At each place where it writes a file, makes a folder or asks for a pipe."""

    def attempt(call: str, nth: int) -> str:
        real, uses = getattr(os, call), 0

        def used(*arguments: Any, **options: Any) -> Any:
            nonlocal uses
            uses += call != "open" or bool(arguments[1] & os.O_CREAT)
            if uses == nth:
                uses += 1
                raise OSError(number, os.strerror(number), "mine")
            return real(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, used)
            try:
                return launcher("*:exit 0", show=None).message
            except InputError as error:
                return str(error)

    for call in ("open", "pipe", "mkdir"):
        for nth in range(1, 20):
            if not (said := attempt(call, nth)):
                break  # so often it is not used
            assert re.match(line, said)
        assert nth > 1
        assert no_process_left(launcher)


def test_signal_handlers_are_given_back(launcher: Launcher) -> None:
    before = signal.getsignal(signal.SIGTERM)
    launcher("*:exit 0")
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_a_rank_started_ends_with_it(launcher: Launcher) -> None:
    launcher("0:parent", "1:kill 0.child.pid", grace=0.5)
    assert (launcher.pids / "0.child.pid").exists()
    wait_until(lambda: no_process_left(launcher))


@pytest.mark.parametrize("code", [0, 5])
def test_what_a_rank_started_ends_with_it_also_when_the_rank_ends_by_itself(launcher: Launcher, code: int) -> None:
    assert launcher("*:exit 0", f"1:parent {code}").code == code
    assert (launcher.pids / "1.child.pid").exists()
    wait_until(lambda: no_process_left(launcher))


def test_warnings_of_unseen_ranks_are_counted_and_the_first_is_named(launcher: Launcher) -> None:
    launcher("*:warn", size=3)
    log = launcher.folder.log(1)
    assert launcher.told == [
        f"2 warnings of other ranks, the first on rank 1: UserWarning: something is odd (log: {log})"
    ]


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from typing import Any
from tests.engine.launch.launcher import Launcher
Launcher(Path({str(tmp_path)!r}))("*:parent")
"""
    kill_when_begun(code, tmp_path / "pids", 4)


def test_a_rank_that_leaves_with_code_0_before_the_others_is_named(launcher: Launcher) -> None:
    result = launcher("0:page wait", "1:page desert", timeout=30.0)
    assert result.code == ExitCode.RANK_LOST
    assert result.message.startswith("a rank ended before the training did, with exit code 0 and without a word")
    assert "in backward B0.0 of step 3" in result.message
    assert f"rank 1, log: {launcher.folder.log(1)}" in result.message


def test_no_rank_outlives_a_killed_launcher_not_even_one_that_cannot_run(tmp_path: Path) -> None:
    """One is stopped, and one keeps the interpreter lock in C."""
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from tests.engine.launch.launcher import Launcher
Launcher(Path({str(tmp_path)!r}))("0:page stop", "1:lock")
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    pids = tmp_path / "pids"
    try:
        wait_until(lambda: len(process_ids(pids)) == 2)
        wait_until(lambda: is_stopped(process_ids(pids)[0]) or is_stopped(process_ids(pids)[1]))
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(alive(each) for each in process_ids(pids)), seconds=5)


def test_a_plugin_that_has_closed_standard_output_delays_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    flush_output()
    monkeypatch.setattr(sys, "stdout", None)
    flush_output()


def test_scratch_folders_of_killed_launchers_are_removed_and_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = os.fork()
    if killed == 0:
        held = scratch_folder()  # a name, so that it is not collected
        held.__enter__()
        os._exit(9)
    os.waitpid(killed, 0)
    (left,) = tmp_path.glob("megatron-run-*")
    (tmp_path / "megatron-run-other").mkdir()  # a sidecar's, which has no such lock
    with scratch_folder() as first, scratch_folder() as second:
        assert not left.exists()
        assert first.is_dir()
        assert second.is_dir()
    assert [each.name for each in tmp_path.iterdir()] == ["megatron-run-other"]


def test_a_launcher_that_looks_before_anothers_lock_is_held_leaves_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock, others = fcntl.flock, list[Path]()

    def late(handle: int, how: int) -> None:
        if not others:  # another launcher comes and goes between the opening of our lock and this
            others.append(tmp_path)
            with scratch_folder() as other:
                others.append(other)
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with scratch_folder() as ours:
        assert len(others) == 2
        assert ours.is_dir()
        with scratch_folder():
            assert ours.is_dir(), "the lock has the name by which others look for it"
        assert [each.name for each in ours.iterdir()] == [".launcher"]


@pytest.mark.parametrize(("state", "what"), [("hang", "hangs"), ("stop", "is stopped by a signal (SIGSTOP)")])
def test_a_rank_that_does_not_come_is_named_with_its_place_and_what_the_other_waits_in(
    launcher: Launcher, state: str, what: str
) -> None:
    result = launcher("0:page wait", f"1:page after {state}", timeout=LIMIT)
    assert result.code == ExitCode.RANK_LOST
    silence = "nothing new for TIME s in backward B0.0 of step 3"
    waits = "rank 0 waits for it in all-reduce of 8 values, number 1 over world, in optimizer of step 3"
    advice = "see the log of that rank, or raise run.timeout if it is only slow"
    text = re.sub(r"for \d\.\d s", "for TIME s", result.message)
    assert text == f"rank 1 {what}: {silence}, {waits}; {advice} (log: {launcher.folder.log(1)})"
    assert no_process_left(launcher)


def test_a_slow_step_is_no_alarm_for_those_who_wait_for_it(launcher: Launcher) -> None:
    """Rank 1 goes on for three times the limit; then it leaves rank 0, which waits for it, alone."""
    start = time.monotonic()
    result = launcher("0:page wait", "1:page slow", timeout=LIMIT)
    assert time.monotonic() - start > 3.0
    assert result.message.startswith("rank 1 has ended without the others: ")


def test_a_killed_rank_is_named_with_what_it_was_doing(launcher: Launcher) -> None:
    result = launcher("0:page hang", "1:page kill", timeout=30.0, grace=0.2)
    expected = f"a rank was killed by SIGKILL in backward B0.0 of step 3 (rank 1, log: {launcher.folder.log(1)})"
    assert (result.code, result.message) == (ExitCode.RANK_LOST, expected)


def test_ranks_that_say_nothing_at_all_are_not_judged(launcher: Launcher) -> None:
    assert launcher("*:talk", timeout=0.2).code == ExitCode.DONE
