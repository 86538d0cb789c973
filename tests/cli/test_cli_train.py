"""The command on real ranks: local ones, torchrun's, and those of two torchrun agents.

One run of each starts its ranks; others, and torchrun's agents, are forked, see ``tests/support/forked.py``. By night
torchrun itself starts its ranks anew.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import COMMAND, TORCHRUN, free_port, run_command, started
from tests.support.forked import FORKING_AGENT, TORCHRUN_AGENT, ForkedCommand, forked_command
from tests.support.processes import alive, wait_until

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]

#: Two stages of the smallest model, one thread each, in a folder named ``run``.
TINY = ("preset:tiny", "--plugin", "schedule=1f1b", "--set", "run.threads=1", "--set", "run.folder=run")
SHORT = (*TINY, "--set", "train.steps=3", "--set", "eval.interval=0")
ENDLESS = (*TINY, "--set", "train.steps=1000000")
NOTICE = "megatron-run: schedule=1f1b suggests parallel.pipeline=2\n"


def status(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run" / "status.json").read_text())
    return content


def log(folder: Path, rank: int, attempt: int = 1) -> Path:
    return folder / "run" / "logs" / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.log"


def ranks_of(launcher: int) -> list[int]:
    """The processes that the launcher has started."""
    return [int(text) for text in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def test_local_ranks_train_and_leave_a_run_folder(tmp_path: Path) -> None:
    done = run_command((*COMMAND, *SHORT), tmp_path)
    assert (done.returncode, done.stderr) == (0, NOTICE)
    assert "step 3/3  loss" in done.stdout
    assert log(tmp_path, 0).read_text() == done.stdout
    assert log(tmp_path, 1).read_text() == ""
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert status(tmp_path)["state"] == "finished"

    again = forked_command((*SHORT, "--json"), tmp_path)
    assert (again.returncode, json.loads(again.stdout)["exit_code"]) == (0, 0)
    assert again.stderr.endswith(f"run folder {tmp_path / 'run'} is finished: nothing to do\n")

    other = forked_command((*SHORT, "--set", "train.lr=1"), tmp_path)
    assert other.returncode == 2
    assert "belongs to another run: train.lr=0.001, now 1.0;" in other.stderr


def has_stepped(folder: Path, attempt: int) -> bool:
    """Whether that attempt has done a step."""
    file = folder / "run" / "status.json"
    return file.exists() and (status(folder)["attempt"], status(folder)["state"]) == (attempt, "running")


@contextmanager
def training(folder: Path, attempt: int = 1, *words: str) -> Iterator[ForkedCommand]:
    """An endless run that has done its first step."""
    with ForkedCommand((*ENDLESS, *words), folder) as process:
        wait_until(lambda: has_stepped(folder, attempt), seconds=60)
        yield process


def test_a_killed_rank_is_started_again_as_often_as_allowed_and_then_ends_the_run_with_one_line(tmp_path: Path) -> None:
    with training(tmp_path, 1, "--max-restarts", "1", "--set", "checkpoint.interval=2steps") as process:
        wait_until(lambda: list((tmp_path / "run" / "checkpoints").glob("step*")), seconds=30)
        first = ranks_of(process.pid)
        os.kill(first[0], signal.SIGKILL)
        wait_until(lambda: has_stepped(tmp_path, attempt=2), seconds=60)
        second = ranks_of(process.pid)
        os.kill(second[1], signal.SIGKILL)
        _, err = process.communicate(timeout=15)
    assert process.returncode == 4
    told = [re.sub(r"in [a-z].*of step \d+ |step \d+ \(seen after .*\)$", "", line) for line in err.splitlines()[1:]]
    killed = "megatron-run: a rank was killed by SIGKILL (rank {}, log: {})"
    assert told[0] == f"{killed.format(0, log(tmp_path, 0, 1))}; starting again, 1 of 1, from "
    assert told[-1] == killed.format(1, log(tmp_path, 1, 2))
    assert not any(alive(rank) for rank in (*first, *second))
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"], status(tmp_path)["retry"]) == ("failed", 4, True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert next(line["step"] for line in lines if line["attempt"] == 2) > 1, "it went on from a saved step"


def test_sigterm_finishes_the_step_and_saves_it_and_the_next_start_goes_on(tmp_path: Path) -> None:
    for attempt in (1, 2):
        with training(tmp_path, attempt) as process:
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=15)
        assert (process.returncode, err.splitlines()[-1]) == (143, "megatron-run: stopped by SIGTERM")
        assert (out + err).count("stopped by SIGTERM") == 1
        assert re.search(r"^[0-9]+ steps? in ", out, re.MULTILINE)
        saved = [int(path.name.removeprefix("step")) for path in (tmp_path / "run" / "checkpoints").glob("step*")]
        assert f"step {max(saved)} is saved: to resume from it, run the same command\n" in err
        assert (status(tmp_path)["state"], status(tmp_path)["attempt"]) == ("stopped", attempt)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, max(saved) + 1)), "no step is missing or done twice"
    assert {line["attempt"] for line in lines} == {1, 2}


def test_sigusr1_announces_a_time_limit_and_ends_with_75(tmp_path: Path) -> None:
    with training(tmp_path) as process:
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=15)
    assert (process.returncode, err.splitlines()[-1]) == (75, "megatron-run: stopped by SIGUSR1")
    assert (status(tmp_path)["state"], status(tmp_path)["retry"]) == ("stopped", True)


def test_ctrl_c_saves_the_step_and_says_so(tmp_path: Path) -> None:
    with training(tmp_path) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=15)
    (saved,) = [int(path.name.removeprefix("step")) for path in (tmp_path / "run" / "checkpoints").glob("step*")]
    assert "Ctrl-C: this step is finished and saved" in err
    line = f"stopped by SIGINT: step {saved} was saved last; to resume from it, run the same command"
    assert (process.returncode, err.splitlines()[-1]) == (130, f"megatron-run: {line}")
    assert (status(tmp_path)["message"], status(tmp_path)["step"]) == (line, saved)


@pytest.mark.nightly  # torchrun itself; local ranks, and a forked agent with a rank that dies, are tried every time
def test_ctrl_c_saves_under_torchrun_too(tmp_path: Path) -> None:
    with started(
        (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "megatron_run_cli", *ENDLESS), tmp_path
    ) as run:
        wait_until(lambda: has_stepped(tmp_path, 1), seconds=90)
        os.kill(run.pid, signal.SIGINT)  # torchrun forwards it to its ranks
        out, err = run.communicate(timeout=40)
    (saved,) = [int(path.name.removeprefix("step")) for path in (tmp_path / "run" / "checkpoints").glob("step*")]
    assert "Ctrl-C: this step is finished and saved" in err, out
    assert out.count("stopped by SIGINT") == 1
    assert (status(tmp_path)["exit_code"], status(tmp_path)["step"]) == (130, saved)


@pytest.mark.nightly
def test_a_second_ctrl_c_leaves_at_once_under_torchrun(tmp_path: Path) -> None:
    """torchrun would wait 30 s for its ranks; rank 1 is in a forward that takes 100."""
    words = ("--standalone", "--nproc-per-node", "2", "-m", "megatron_run_cli", *ENDLESS)
    slow = "rank=1,step=2,at=forward,kind=slow,seconds=100"
    with started((*TORCHRUN, *words), tmp_path, MEGATRON_RUN_FAULT=slow) as run:
        wait_until(lambda: has_stepped(tmp_path, 1), seconds=90)
        ranks = ranks_of(run.pid)
        assert len(ranks) >= 2
        os.kill(run.pid, signal.SIGINT)
        assert run.stderr is not None
        while "Ctrl-C: this step is finished and saved" not in (line := run.stderr.readline()):
            assert line, "it ended without a word"
        os.kill(run.pid, signal.SIGINT)
        run.communicate(timeout=20)
        wait_until(lambda: not any(alive(rank) for rank in ranks), seconds=5)


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with training(tmp_path) as process:
        ranks = ranks_of(process.pid)
        assert len(ranks) >= 2
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(alive(rank) for rank in ranks), seconds=5)


BUG = """
from megatron_run import PluginInfo, hookimpl
from megatron_run.contracts import Scaler
import os, torch

class OnlyOnRankOne(Scaler):
    @property
    def scale(self):
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("a bug of mine")
        return torch.ones(1)

    def update(self, found_inf):
        return None

@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("scaler", "bug")

@hookimpl
def megatron_run_create_scaler(context, options):
    return OnlyOnRankOne()
"""


def test_a_bug_on_one_rank_is_named_and_its_traceback_kept(tmp_path: Path) -> None:
    (tmp_path / "bug.py").write_text(BUG)
    done = forked_command((*SHORT, "--plugin", "scaler=./bug.py"), tmp_path)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("megatron-run: ZeroDivisionError: a bug of mine (in ")
    assert line.endswith(f"(rank 1, log: {log(tmp_path, 1)})")
    assert "Traceback" in log(tmp_path, 1).read_text()
    assert status(tmp_path)["exit_code"] == 1


DIES_ONCE = """
from megatron_run import PluginInfo, hookimpl
from megatron_run.contracts import Scaler
import os, torch

class DiesOnce(Scaler):
    held = torch.ones(1)

    updates = 0

    @property
    def scale(self):
        return self.held

    def update(self, found_inf):
        self.updates += 1
        if (self.updates, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (2, "1", "0"):
            os._exit(9)

@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("scaler", "dies_once")

@hookimpl
def megatron_run_create_scaler(context, options):
    return DiesOnce()
"""


def test_torchrun_starts_the_ranks_and_again_after_one_has_died(tmp_path: Path) -> None:
    """The agent's store outlives the ranks: the second attempt must not read the notes of the first."""
    (tmp_path / "dies_once.py").write_text(DIES_ONCE)
    words = (*SHORT, "--plugin", "scaler=./dies_once.py", "--set", "run.timeout=20")
    agent = ("--max-restarts", "1", "--nproc-per-node", "2", "-m", "megatron_run_cli")
    done = forked_command((*agent, *words), tmp_path, program=FORKING_AGENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 3/3  loss") == 1
    assert log(tmp_path, 1).exists()
    kept = log(tmp_path, 0, attempt=2).read_text()
    assert kept.startswith("training on the CPU: no GPU"), "printed before the log was open"
    assert NOTICE in kept, "on the terminal it is an error's line"
    (took,) = [line for line in kept.splitlines(keepends=True) if "s from the report of a lost rank" in line]
    assert took in done.stderr, "as every warning"
    assert done.stdout.endswith(kept.replace(NOTICE, "").replace(took, ""))
    assert log(tmp_path, 0).read_text().startswith("training on the CPU: no GPU")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [attempt["attempt"] for attempt in record["attempts"]] == [1, 2]
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("finished", 3)
    restart = json.loads((log(tmp_path, 0, attempt=2).parent / "restart.json").read_text())
    assert restart["unknown"] == ["detection", "ranks_gone"], "the agent does not say"
    assert list(restart["seconds"]) == ["processes", "join", "build", "load", "first_step"]
    assert not (log(tmp_path, 0).parent / "restart.json").exists()


@pytest.mark.nightly  # torchrun itself, and its own way to end
def test_under_torchrun_a_mistake_is_said_once(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "2", "-m", "megatron_run_cli", *SHORT, "--set", "train.lrr=1")
    done = run_command((*TORCHRUN, *words), tmp_path)
    assert done.returncode == 1  # torchrun's own, whatever its workers return
    assert done.stderr.count("megatron-run: unknown key train.lrr") == 1
    assert "exitcode  : 2" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly  # one agent is started by `make test`
def test_two_torchrun_agents_are_one_run(tmp_path: Path) -> None:
    meeting = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port")
    with ExitStack() as stack:
        port = str(free_port())
        agents = [
            stack.enter_context(ForkedCommand((*words, *SHORT), tmp_path, program=TORCHRUN_AGENT))
            for words in ((*meeting, port, "--node-rank", str(node), "-m", "megatron_run_cli") for node in range(2))
        ]
        (first, errors), (second, others) = (agent.communicate(timeout=90) for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0], errors + others
    assert "step 3/3  loss" in first
    assert second == ""
    assert first == log(tmp_path, 0).read_text().replace(NOTICE, "")
    assert status(tmp_path)["state"] == "finished"
