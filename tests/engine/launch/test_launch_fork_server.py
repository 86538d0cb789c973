"""Ranks that are forked from a server end, fail and are signalled as those that are started anew."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_run.errors import ExitCode
from megatron_run.planning import load_config
from megatron_run.planning.run_text import hand_over
from megatron_run_engine.launch import fork_server, start
from megatron_run_engine.launch.job import RunResult
from tests.engine.launch.launcher import Launcher, no_process_left
from tests.support.processes import alive, kill_when_begun, wait_until

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(60)]
STAND_IN = Path(__file__).with_name("stand_in_server.py")
ROOT = Path(__file__).parents[3]
#: For processes that import the tests: what is imported from elsewhere stays so.
PYTHONPATH = os.pathsep.join((str(ROOT), *filter(None, (os.environ.get("PYTHONPATH"),))))


def forked(launcher: Launcher, *behaviours: str, how: str = "plain", **changes: Any) -> RunResult:
    """Run ``behaviours`` on ranks of a server whose imports do what ``how`` says."""
    program = (sys.executable, str(STAND_IN), str(launcher.pids), how, *behaviours)
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "SERVER_PROGRAM", program)
        return launcher(fork=True, environment=environment, **changes)


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


def test_a_forked_rank_has_what_a_new_process_has(tmp_path: Path) -> None:
    described = []
    for name in ("spawned", "forked"):
        (tmp_path / name).mkdir()
        launcher = Launcher(tmp_path / name)
        changes: dict[str, Any] = {"size": 3, "shown": {"FORCE_COLOR": "1"}}
        if name == "forked":
            result = forked(launcher, "*:describe", **changes)
        else:
            result = launcher("*:describe", environment={**os.environ, "PYTHONPATH": PYTHONPATH}, **changes)
        assert result.code == ExitCode.DONE
        assert b"".join(launcher.shown).decode() == launcher.log(0)
        described.append([eval(launcher.log(rank), {"Signals": None} | vars(signal)) for rank in range(3)])
        for rank, each in enumerate(described[-1]):
            assert each.pop("files") == {0: "/dev/null"} | dict.fromkeys((1, 2), str(launcher.folder.log(rank)))
            each["argument"] = Path(each["argument"]).name
    for spawned, from_server in zip(*described, strict=True):
        for key, value in spawned.items():
            assert from_server[key] == value, key


def test_generators_that_nobody_seeds_differ_between_ranks(launcher: Launcher) -> None:
    forked(launcher, "*:chance", how="numpy")
    (python, numpy), (other_python, other_numpy) = (launcher.log(rank).split() for rank in range(2))
    assert python != other_python
    assert numpy != other_numpy


@pytest.mark.parametrize("code", [0, pytest.param(5, marks=pytest.mark.nightly), 9])  # 5: a rank with a child has it
def test_exit_codes_pass_through(launcher: Launcher, code: int) -> None:
    result = forked(launcher, "*:exit 0", f"1:exit {code}")
    assert result.code == (ExitCode.BUG if code == 9 else code)


def test_a_machine_without_room_for_one_more_process_is_named_with_what_to_allow(launcher: Launcher) -> None:
    result = forked(launcher, "*:exit 0", how="crowded")
    assert result.code == ExitCode.INPUT
    assert result.message.startswith(
        "a rank ended with exit code 2: too many processes or threads run: ulimit -u allows"
    )


def test_a_killed_rank_is_lost_and_named_with_its_signal(launcher: Launcher) -> None:
    result = forked(launcher, "*:wait", "1:kill", grace=0.2)
    assert result.code == ExitCode.RANK_LOST
    assert result.message == f"a rank was killed by SIGKILL (rank 1, log: {launcher.folder.log(1)})"
    assert no_process_left(launcher)


def test_a_traceback_is_a_bug_named_by_its_last_line(launcher: Launcher) -> None:
    result = forked(launcher, "*:wait", "1:raise strange things", grace=0.2)
    expected = f"a rank ended with exit code 1: ValueError: strange things (rank 1, log: {launcher.folder.log(1)})"
    assert (result.code, result.message) == (ExitCode.BUG, expected)


def test_the_ranks_of_the_next_attempt_are_forked_from_what_was_imported_for_the_last(launcher: Launcher) -> None:
    def server() -> str:
        return (launcher.pids / "server.pid").read_text()

    with start.Servers() as servers:
        died = forked(launcher, "*:wait", "1:kill", grace=0.2, servers=servers)
        assert (died.code, died.steps) == (ExitCode.RANK_LOST, 0)
        assert died.lost is not None
        assert died.lost.died <= died.lost.detected <= died.lost.ended
        first = server()
        launcher.folder.log(1).write_text("")
        assert forked(launcher, "*:wait", "1:kill", grace=0.2, servers=servers).message == died.message
        assert server() == first
        assert forked(launcher, "*:wait", "1:kill", grace=0.2, servers=servers, threads=2).code == ExitCode.RANK_LOST
        assert server() != first, "OpenMP reads its variables when it is loaded"
        os.kill(int(server()), signal.SIGKILL)
        wait_until(lambda: not alive(int(server())))
        assert forked(launcher, "*:exit 5", servers=servers).code == 5
    assert no_process_left(launcher)


def test_what_a_rank_started_ends_with_it(launcher: Launcher) -> None:
    assert forked(launcher, "*:exit 0", "1:parent 5").code == 5
    assert (launcher.pids / "1.child.pid").exists()
    wait_until(lambda: no_process_left(launcher))


@pytest.mark.parametrize("how", ["plain", "slow"])
def test_a_signal_ends_ranks_politely_and_before_there_are_any_the_server(launcher: Launcher, how: str) -> None:
    def send() -> None:
        wait_until((launcher.pids / "server.pid").exists if how == "slow" else launcher.ready)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    result = forked(launcher, "*:polite", how=how)
    sender.join()
    assert (result.code, result.message) == (ExitCode.SIGTERM, "stopped by SIGTERM")
    assert launcher.log(1) == ("the step is done\n" if how == "plain" else "")
    assert no_process_left(launcher)


def test_ranks_are_started_anew_when_an_import_has_started_a_thread(launcher: Launcher) -> None:
    result = forked(launcher, "*:exit 0", "1:exit 5", how="thread")
    assert result.code == 5
    assert [launcher.log(rank) for rank in range(2)] == [f"rank {rank} prints\n" for rank in range(2)]


def test_ranks_of_several_threads_are_forked_once_all_that_they_need_is_imported(tmp_path: Path) -> None:
    """No import of a run leaves a thread, what torch's libraries are told stays, and no rank imports anything anew.

    Nobody imports torch's compiler, which torch's optimizers and its choice of deterministic kernels would.
    """
    code = """
import os, sys
from pathlib import Path
from megatron_run_engine.launch.fork_server import can_fork, preload
from megatron_run_engine.launch.job import Job
before = dict(os.environ)
assert preload(Job(sys.argv[1], Path("run"), 1, 2)) is not None
assert os.environ == before
print(can_fork())
import torch
from megatron_run_engine.host.process import chosen_kernels
from megatron_run_engine.launch import worker
from megatron_run_engine.optim.update_rules import UpdateOptions, find_rule
loaded = set(sys.modules)
with chosen_kernels(None, "cpu"):
    assert torch.are_deterministic_algorithms_enabled()
    for name in ("adamw", "adam", "sgd"):
        weight = torch.zeros(1, requires_grad=True)
        rule = find_rule(UpdateOptions(rule=name)).make([{"params": [weight]}], weight.device)
        torch.autograd.backward([weight * 2], [torch.ones(1)])
        rule.step()
        assert weight.item() < 0
dear = ("sympy", "torch._dynamo", "torch._inductor", "torch.fx", "megatron_run")
print(*(name for name in set(sys.modules) - loaded if name.startswith(dear)), *(set(sys.modules) & set(dear[1:3])))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    for name in ("OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR"):
        environment.pop(name, None)
    words = [sys.executable, "-c", code, hand_over(load_config("preset:tiny", nproc=2))]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50)
    assert (done.stdout, done.stderr) == ("True\n\n", "")


class Gone:
    """The socket of a launcher that died before it had read all that it was told (Linux: ECONNRESET, then EPIPE)."""

    def __init__(self, error: type[ConnectionError]) -> None:
        self.error = error

    def sendall(self, _data: bytes) -> None:
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError, ConnectionResetError])
def test_the_server_outlives_its_launcher_to_end_the_ranks(error: type[ConnectionError]) -> None:
    fork_server._tell(Gone(error), "started", 0, 1)  # type: ignore[arg-type]  # all that it needs of a socket


def test_a_server_that_is_killed_takes_its_ranks_along_and_the_run_is_lost(launcher: Launcher) -> None:
    def kill() -> None:
        wait_until(launcher.ready)
        os.kill(int((launcher.pids / "server.pid").read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    result = forked(launcher, "*:stubborn")
    killer.join()
    assert result.code == ExitCode.RANK_LOST
    wait_until(lambda: no_process_left(launcher))


def test_an_import_that_ends_the_server_is_named(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (sys.executable, "-c", "raise ValueError('strange things')")
    monkeypatch.setattr(start, "SERVER_PROGRAM", program)
    result = launcher(fork=True)
    assert result.code == ExitCode.BUG
    assert "ValueError: strange things" in result.message


def test_no_rank_outlives_a_killed_launcher_not_even_a_stopped_one(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.engine.launch.launcher import Launcher
from tests.engine.launch.test_launch_fork_server import forked
forked(Launcher(Path({str(tmp_path)!r})), "0:parent", "1:page stop")
"""
    kill_when_begun(code, tmp_path / "pids", 4)  # the server, two ranks and a child


def test_a_server_that_still_imports_ends_with_its_killed_launcher(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.engine.launch.launcher import Launcher
from tests.engine.launch.test_launch_fork_server import forked
forked(Launcher(Path({str(tmp_path)!r})), "0:leave", how="slow")
"""
    kill_when_begun(code, tmp_path / "pids", 1)


@pytest.mark.parametrize(("launcher", "code"), [(1, 0), (77, int(ExitCode.RANK_LOST))])
def test_a_launcher_that_is_the_first_process_of_a_container_is_not_taken_for_dead(launcher: int, code: int) -> None:
    """Nor is another parent, such as a subreaper, taken for the launcher."""
    program = """
import os, sys
from megatron_run_engine.launch import fork_server

os.getppid = lambda: 1
with fork_server._ending_with(int(sys.argv[1])):
    os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", program, str(launcher)], check=False).returncode == code


def test_a_launcher_that_has_more_files_open_than_select_can_count_hears_its_server() -> None:
    beyond, (soft, hard) = 1500, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= beyond:
        pytest.skip(f"ulimit -Hn is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, beyond + 1), hard))
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, beyond)) as control:
            server = start._Server(mock.Mock(), control, {})
            server.fork(Path("job.json"), 1)
            assert not server.hear(0.0)
            theirs.sendall(b"started 0 77 1.5\n")
            assert server.hear(10.0)
            assert server.ranks[0].pid == 77
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
