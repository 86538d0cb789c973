"""Runs on fewer ranks than they want, more again, and none for long: the numbers are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode
from megatron_run.planning import resolve
from megatron_run_engine.checkpoint.saving import Saver
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.world import StopRequest, World
from megatron_run_engine.training.health.guards import Guards
from megatron_run_engine.training.numbers import Progress
from megatron_run_engine.training.trainer import train_rank
from tests.support.commands import free_port
from tests.support.forked import FORKING_AGENT, ForkedCommand, ForkedRun, Ran, forked_command, learned, run_forked, tiny
from tests.support.processes import wait_until

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

#: Twelve samples are shared by 1, 2, 3, 4, 6 and 12 ranks.
ELASTIC: Mapping[str, Any] = {"run.elastic": "data", "train.global_batch_size": 12, "run.timeout": 60}
#: Losses of other layouts agree to this.
ROUNDING = 2e-6


def attempts(folder: Path, *keys: str) -> list[tuple[Any, ...]]:
    entries = json.loads((folder / "run.json").read_text())["attempts"]
    return [tuple(entry.get(key) for key in keys) for entry in entries]


def assert_same_numbers(folder: Path, whole: Path) -> None:
    got, expected = learned(folder), learned(whole)
    assert got.keys() == expected.keys()
    for step, row in expected.items():
        assert got[step]["loss"] == pytest.approx(row["loss"], abs=ROUNDING)
        assert got[step]["lr"] == row["lr"]


def words(request: Request) -> tuple[str, ...]:
    sets = (f"{key}={value}" for key, value in request.values.items())
    return ("preset:tiny", *(word for each in sets for word in ("--set", each)))


def test_a_lost_rank_is_left_out_and_comes_back_once_the_others_have_made_progress(tmp_path: Path) -> None:
    request = tiny(tmp_path / "run", {**ELASTIC, "train.steps": 6}, ("optimizer=zero1",), nproc=4)
    dies = ("step=2,attempt=1,at=forward", "attempt=2,at=load", "attempt=3,at=load")
    fault = ";".join((*(f"rank=2,{each},kind=kill" for each in dies), "rank=1,step=4,attempt=4,at=forward,kind=kill"))
    ran = run_forked(request, fault, timeout=250, max_restarts=9)
    assert (ran.code, ran.message) == (0, "")
    assert attempts(tmp_path / "run", "ranks") == [(4,), (4,), (4,), (3,), (4,)]
    assert attempts(tmp_path / "run", "elastic", "spares") == [("data", 0)] * 5
    assert [why for (why,) in attempts(tmp_path / "run", "why")[1:]] == [line for line in ran.told if "again" in line]
    assert "run.elastic=data: 3 of 3 ranks train as data 3, 4 microbatches a step" in ran.told
    records = [tmp_path / "run" / "logs" / f"attempt-00{number}" for number in (1, 4)]
    assert [json.loads((each / "plan.json").read_text())["topology"]["data"] for each in records] == [4, 3]
    assert len({(each / "config.yaml").read_text() for each in (*records, tmp_path / "run")}) == 1, "what was typed"
    assert run_forked(tiny(tmp_path / "whole", {**ELASTIC, "train.steps": 6}, ("optimizer=zero1",), nproc=4)).code == 0
    assert_same_numbers(tmp_path / "run", tmp_path / "whole")


def test_a_run_that_fits_on_none_of_the_ranks_that_are_left_says_why(tmp_path: Path) -> None:
    request = tiny(tmp_path / "run", {**ELASTIC, "run.min_ranks": 2}, nproc=2)
    ran = run_forked(request, "rank=1,at=load,kind=kill", timeout=250, max_restarts=9)
    assert ran.code == 4
    assert "; not started again: 1 rank is too few: this run trains on 1, 2, 3, 4, 6, 12 ranks" in ran.message
    assert ran.message.endswith("; set run.min_ranks to 1 or less")


def test_a_rank_beyond_those_that_fit_stands_by_until_the_others_have_ended(tmp_path: Path) -> None:
    values = {**ELASTIC, "train.global_batch_size": 4, "train.steps": 2}
    agent = ("--nproc-per-node", "3", "-m", "megatron_run_cli")
    request = tiny(tmp_path / "run", values)
    done = forked_command((*agent, *words(request)), tmp_path, timeout=200, program=FORKING_AGENT)
    assert done.returncode == 0, done.stderr
    assert "run.elastic=data: 2 of 3 ranks train as data 2, 2 microbatches a step; 1 is spare" in done.stderr
    assert attempts(tmp_path / "run", "ranks", "spares") == [(2, 1)]
    assert "a spare: ranks 0 to 1 train" in (tmp_path / "run/logs/attempt-001/rank-00002.log").read_text()
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "finished"


@pytest.mark.nightly  # an agent takes seconds to miss another one
def test_torchrun_goes_on_without_an_agent_that_is_killed_and_with_one_that_comes(tmp_path: Path) -> None:
    values = {**ELASTIC, "train.steps": 40, "checkpoint.keep": 4}
    request = tiny(tmp_path / "run", values)
    meeting = f"127.0.0.1:{free_port()}"
    patience = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"
    slow = {"MEGATRON_RUN_FAULT": "rank=0,at=data,kind=slow,seconds=0.2"}
    slow["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        "1"  # else torch 2.13 tells an agent that comes later of no meeting place
    )

    def agent(*, host: bool) -> ForkedCommand:
        conf = f"{patience},is_host={int(host)}"
        options = ("--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "9", "--monitor-interval", "0.2")
        meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", "elastic", "--rdzv-conf", conf)
        command = (*options, *meet, "-m", "megatron_run_cli", *words(request))
        return stack.enter_context(ForkedCommand(command, tmp_path, program=FORKING_AGENT, **slow))

    def done(step: int) -> Callable[[], bool]:
        return lambda: max(learned(tmp_path / "run"), default=0) >= step

    with ExitStack() as stack:
        first, second = agent(host=True), agent(host=False)
        wait_until(done(3), 120)
        os.killpg(second.pid, signal.SIGKILL)
        wait_until(lambda: len(attempts(tmp_path / "run", "ranks")) == 2 and done(12)(), 120)
        third = agent(host=False)
        ends = [each.communicate(120) for each in (first, third)]
        assert [first.returncode, third.returncode] == [0, 0], [error[-2000:] for _, error in ends]
    assert attempts(tmp_path / "run", "ranks") == [(4,), (2,), (4,)]
    assert run_forked(tiny(tmp_path / "whole", values, nproc=4)).code == 0
    assert_same_numbers(tmp_path / "run", tmp_path / "whole")


def stopped(
    folder: Path, fault: str, after: int, stop: Callable[[ForkedRun], object], values: Mapping[str, Any]
) -> Ran:
    """A run that is asked to end once a step is done."""
    request = tiny(folder, {"train.steps": 60, **values}, nproc=2)
    with ForkedRun(request, fault, timeout=120) as run:
        wait_until(lambda: max(learned(folder), default=0) >= after, 90)
        stop(run)
        return run.wait()


def terminated(run: ForkedRun) -> None:
    run.signal(signal.SIGTERM)


def test_a_step_that_fits_is_finished_and_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    slow = "at=data,kind=slow,seconds=0.2"
    ran = stopped(folder, slow, 2, terminated, {"checkpoint.interval": 0, "run.stop_within": "100 s"})
    assert ran.code == 143
    assert Checkpoints(folder / "checkpoints").newest() == max(learned(folder)) < 60


def test_a_step_that_cannot_end_in_time_is_left_and_the_last_commit_stays(tmp_path: Path) -> None:
    """Step 3 would take 100 s, which nothing tells before it does."""
    folder = tmp_path / "run"
    slow = "step=3,at=optimizer,kind=slow,seconds=100"
    ran = stopped(folder, slow, 2, terminated, {"run.stop_within": "3 s"})
    assert ran.code == 143
    assert ran.seconds < 100
    checkpoints = Checkpoints(folder / "checkpoints")
    assert checkpoints.newest() == 2
    checkpoints.verify(2)
    log = (folder / "logs/attempt-001/rank-00000.log").read_text()
    assert "stopped by SIGTERM: " in log
    assert log.rstrip().endswith("; step 2 is saved")


class Asked(StopRequest):
    """A stop that is asked for as the third step begins; both its ends keep what was saved before."""

    def __init__(self, save_seconds: float) -> None:
        super().__init__(within=100.0)
        self._took = save_seconds

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if step == 3:
            self.save_seconds = self._took
            self.stop(ExitCode.SIGTERM)


@pytest.mark.parametrize("fits", [True, False])
def test_a_save_that_cannot_end_in_time_is_not_begun(fits: bool, tmp_path: Path) -> None:
    values = {"checkpoint.interval": 2, "eval.interval": 3, "train.steps": 9, "run.stop_within": "100 s"}
    run = resolve(tiny(tmp_path, values))
    code = train_rank(run, World(), RunFolder(tmp_path, 1), Asked(0.0 if fits else 1000.0))
    assert code is ExitCode.SIGTERM
    assert Checkpoints(tmp_path / "checkpoints").steps() == ([2, 3] if fits else [2])
    assert max(learned(tmp_path)) == 3


def test_a_save_that_has_begun_in_the_background_has_the_time_that_is_left(tmp_path: Path) -> None:
    values = {"checkpoint.interval": 2, "checkpoint.async_save": True, "train.steps": 9, "run.stop_within": "100 s"}
    save = Saver.save

    def slow(saver: Saver, *what: Any) -> int:
        time.sleep(0.5)
        return save(saver, *what)

    with mock.patch.object(Saver, "save", slow):
        code = train_rank(resolve(tiny(tmp_path, values)), World(), RunFolder(tmp_path, 1), Asked(1000.0))
    assert code is ExitCode.SIGTERM
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2]
    assert max(learned(tmp_path)) == 3


def test_what_the_disk_is_too_slow_for_is_kept_in_memory(tmp_path: Path) -> None:
    folder, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    kept = {"checkpoint.interval": 2, "checkpoint.memory_interval": 100, "checkpoint.memory_folder": str(memory)}
    run = resolve(tiny(folder, {**kept, "train.steps": 5, "run.stop_within": "100 s"}))
    checked: list[tuple[int, bool]] = []

    def check(_: Guards, progress: Progress, *, saving: bool, **__: object) -> None:
        checked.append((progress.step, saving))

    for number, stop in enumerate((Asked(1000.0), StopRequest()), 1):
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_text(json.dumps({"id": "0123456789abcdef" * 2}))
        with mock.patch.object(Guards, "check", check):
            code = train_rank(run, World(), RunFolder(folder, number), stop)
        assert code is (ExitCode.SIGTERM, ExitCode.DONE)[number - 1]
        assert checked[-1] == ((3, 5)[number - 1], True), "nothing is kept on which the replicas do not agree"
        assert Checkpoints(folder / "checkpoints").newest() == (2, 5)[number - 1]
        assert [path.name for path in memory.glob("*/*/step*")] == (["step3"], [])[number - 1]
    assert learned(folder).keys() == {1, 2, 3, 4, 5}


def test_a_file_stops_a_run_as_a_signal_does(tmp_path: Path) -> None:
    folder, notice = tmp_path / "run", tmp_path / "notice"
    slow = "at=data,kind=slow,seconds=0.2"
    ran = stopped(folder, slow, 2, lambda _: notice.touch(), {"run.stop_file": str(notice)})
    assert ran.code == 143
    assert Checkpoints(folder / "checkpoints").newest() == max(learned(folder)) < 60
    assert ran.message == f"stopped by {notice} (run.stop_file)"
    assert json.loads((folder / "status.json").read_text())["message"] == ran.message
    assert (
        f"{notice} is there: the run stops as after SIGTERM" in (folder / "logs/attempt-001/rank-00000.log").read_text()
    )


def test_a_file_that_leaves_a_step_undone_is_named_too(tmp_path: Path) -> None:
    folder, notice = tmp_path / "run", tmp_path / "notice"
    slow, asked = "step=3,at=optimizer,kind=slow,seconds=100", {"run.stop_file": str(notice), "run.stop_within": "3 s"}
    ran = stopped(folder, slow, 2, lambda _: notice.touch(), asked)
    assert ran.code == 143
    assert ran.message.startswith(f"stopped by {notice} (run.stop_file): ")
    assert ran.message.endswith("; step 2 is saved")
