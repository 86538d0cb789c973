"""Training from Python: in this process, on local ranks, and as a rank of somebody's world."""

from __future__ import annotations

import gc
import json
import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils import deterministic as kernels

from megatron_run import Action, load_config
from megatron_run.contracts import Observer, Schedule, StepMetrics
from megatron_run.contracts.schedule import ScheduleSpec
from megatron_run.errors import ExitCode, InputError
from megatron_run_engine import train
from megatron_run_engine.launch import FailedRunError
from megatron_run_engine.launch.api import _of_size
from megatron_run_engine.runtime.gradients import GradientAccumulator
from megatron_run_engine.runtime.world import World
from tests.support.commands import free_port
from tests.support.forked import ForkedCommand, forked_command, learned

SETS = {"train.steps": 3, "eval.interval": 0, "run.threads": 1, "observer.use": "jsonl"}


def status(folder: Path) -> Any:
    return json.loads((folder / "status.json").read_text())


class OneByOne(Schedule):
    def actions(self, spec: ScheduleSpec) -> list[list[Action]]:
        pairs = [(Action("F", m, 0), Action("B", m, 0)) for m in range(spec.microbatches)]
        return [[action for pair in pairs for action in pair] for _ in range(spec.stages)]


class Ends(Observer):
    """Sends a signal after the second step, or raises it."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.steps: list[int] = []

    def on_step_end(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics.step)
        if metrics.step == 2:
            os.kill(os.getpid(), self.number)


def test_a_world_of_one_trains_in_this_process_with_an_object_as_plugin(tmp_path: Path) -> None:
    result = train(load_config("preset:tiny", sets=SETS | {"run.folder": tmp_path}, plugins=[OneByOne()]))
    assert (result.code, result.folder) == (ExitCode.DONE, tmp_path)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("finished", 3)


def test_what_was_trained_is_freed_when_the_run_has_ended(tmp_path: Path) -> None:
    def alive() -> int:
        return sum(type(each) is GradientAccumulator for each in gc.get_objects())

    gc.collect()
    before = alive()
    train(load_config("preset:tiny", sets=SETS | {"run.folder": tmp_path}))
    assert alive() == before


def test_sigterm_finishes_the_step_and_gives_the_handler_back(tmp_path: Path) -> None:
    before, observer = signal.getsignal(signal.SIGTERM), Ends(signal.SIGTERM)
    sets = SETS | {"run.folder": tmp_path, "train.steps": 9}
    result = train(load_config("preset:tiny", sets=sets, plugins=[observer]))
    assert result.code == ExitCode.SIGTERM
    assert observer.steps[:2] == [1, 2]
    assert len(observer.steps) <= 3  # the signal came while step 2 was reported: step 3 carries it to all ranks
    assert status(tmp_path)["state"] == "stopped"
    assert signal.getsignal(signal.SIGTERM) is before


class Impatient(Ends):
    """Presses Ctrl-C twice."""

    def on_step_end(self, metrics: StepMetrics) -> None:
        super().on_step_end(metrics)
        super().on_step_end(metrics)


@pytest.mark.parametrize(("observer", "saved"), [(Ends, 3), (Impatient, 1)])
def test_ctrl_c_saves_and_reaches_the_caller_and_a_second_one_at_once(
    observer: type[Ends], saved: int, tmp_path: Path
) -> None:
    sets = SETS | {"run.folder": tmp_path, "checkpoint.interval": 1, "train.steps": 9}
    with pytest.raises(KeyboardInterrupt):
        train(load_config("preset:tiny", sets=sets, plugins=[observer(signal.SIGINT)]))
    said = status(tmp_path)
    assert (said["state"], said["exit_code"]) == ("stopped", 130)
    assert f"step {saved} was saved last; to resume from it, run " in said["message"]


def process_state() -> list[Any]:
    """What a program may have chosen for itself, apart from the generator."""
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = kernels.fill_uninitialized_memory  # type: ignore[attr-defined]  # torch hides it behind a class
    return [(*deterministic, filled), torch.get_num_threads(), dict(os.environ)]


@pytest.mark.parametrize("interrupted", [False, True])
def test_training_here_leaves_the_process_as_it_was(tmp_path: Path, interrupted: bool) -> None:
    class Looks(Observer):
        def on_step_end(self, metrics: StepMetrics) -> None:
            seen.append(process_state())
            if interrupted:
                raise KeyboardInterrupt

    seen: list[Any] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(False)  # torch's first call names a compiler's cache in the environment
    try:
        torch.manual_seed(5)
        before, expected = process_state(), torch.rand(3, generator=torch.Generator().manual_seed(5))
        with suppress(KeyboardInterrupt):
            train(load_config("preset:tiny", sets=SETS | {"run.folder": tmp_path}, plugins=[Looks()]))
        assert process_state() == before
        assert torch.equal(torch.rand(3), expected)
        assert before[0] == (False, False, True)
        assert seen[0][:2] == [(True, False, False), 1]
    finally:
        torch.set_num_threads(threads)


def train_on_stages() -> None:
    """A program that trains on two ranks."""
    run = load_config("preset:tiny", sets=SETS | {"run.folder": Path.cwd() / "two"}, plugins=["schedule=1f1b"])
    assert train(run).code == ExitCode.DONE


@pytest.mark.multiproc
def test_several_ranks_are_processes_and_do_the_same(tmp_path: Path) -> None:
    ran = forked_command((), tmp_path, program=f"{__name__}:{train_on_stages.__name__}")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert train(load_config("preset:tiny", sets=SETS | {"run.folder": tmp_path / "one"})).code == ExitCode.DONE
    one, two = ([each["loss"] for each in learned(tmp_path / name).values()] for name in ("one", "two"))
    assert len(one) == 3
    assert two == pytest.approx(one, abs=1e-5)


def train_in_vain() -> None:
    """A program whose ranks fail: what is raised."""
    sets = SETS | {"run.folder": Path.cwd() / "run"}
    run = load_config("preset:tiny", sets=sets, plugins=[f"scaler={Path.cwd() / 'bad.py'}"], nproc=2)
    with pytest.raises(FailedRunError, match="no data today") as caught:
        train(run)
    assert caught.value.exit_code == caught.value.result.code == ExitCode.DATA


@pytest.mark.multiproc
def test_ranks_that_fail_are_an_exception_with_their_exit_code(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from megatron_run import PluginInfo, RunError, hookimpl\n"
        "from megatron_run.errors import DataError\n"
        "@hookimpl\n"
        "def megatron_run_plugin_info():\n"
        "    return PluginInfo('scaler', 'bad')\n"
        "@hookimpl\n"
        "def megatron_run_create_scaler(context, options):\n"
        "    raise DataError('no data today')\n"
    )
    ran = forked_command((), tmp_path, program=f"{__name__}:{train_in_vain.__name__}")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_an_object_cannot_travel_to_other_processes(tmp_path: Path) -> None:
    sets = SETS | {"run.folder": tmp_path / "run", "parallel.data": 2}
    with pytest.raises(
        InputError, match=r"a run of 2 ranks cannot use schedule=onebyone: .*write the plugin into a file"
    ):
        train(load_config("preset:tiny", sets=sets, plugins=[OneByOne()]))
    assert not (tmp_path / "run").exists()


def test_nor_to_another_number_of_ranks_of_a_world_that_others_made() -> None:
    run = load_config("preset:tiny", sets={"parallel.data": 2, "run.elastic": "data"}, plugins=[OneByOne()])
    world = World(0, 1, launcher="torchrun")
    with (
        mock.patch("megatron_run_engine.launch.attempts.find_world", return_value=world),
        pytest.raises(InputError, match=r"cannot use schedule=onebyone: .* resolved again") as refused,
    ):
        _of_size(run, world)
    assert "torchrun" not in str(refused.value)


def slurm_step(folder: Path, *words: str, ranks: int = 2) -> list[tuple[int, str]]:
    """The tasks that srun would start on this host; exit code and standard error of each."""
    common = {
        "SLURM_NTASKS": str(ranks),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_TASKS_PER_NODE": str(ranks),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "MASTER_PORT": str(free_port()),
    }

    def task(rank: int) -> ForkedCommand:
        place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        seed = {"MEGATRON_RUN_SET": f"train.seed={rank}"} if "differ" in words else {}
        typed = tuple(word for word in words if word != "differ")
        return ForkedCommand(typed, folder, **common, **place, **seed)

    with ExitStack() as stack:
        tasks = [stack.enter_context(task(rank)) for rank in range(ranks)]
        said = [task.communicate(timeout=90)[1] for task in tasks]
        return [(task.returncode or 0, err) for task, err in zip(tasks, said, strict=True)]


TINY = ("preset:tiny", "--set", "run.folder=run", "--set", "run.threads=1", "--set", "train.steps=3")


@pytest.mark.multiproc
def test_a_slurm_step_is_one_run(tmp_path: Path) -> None:
    assert [code for code, _ in slurm_step(tmp_path, *TINY)] == [0, 0]
    assert status(tmp_path / "run")["state"] == "finished"
    assert (tmp_path / "run" / "logs" / "attempt-001" / "rank-00001.log").exists()


@pytest.mark.multiproc
def test_every_task_of_a_slurm_step_ends_with_the_code_and_one_speaks(tmp_path: Path) -> None:
    """Rank 0 serves the rendezvous: it must not leave before the others know."""
    (first, said), (second, silent) = slurm_step(tmp_path, *TINY, "differ")
    assert (first, second) == (3, 3)
    assert "train.seed: 0 on rank 0 (" in said
    assert silent == ""


def test_a_configuration_is_no_run_yet() -> None:
    with pytest.raises(InputError, match="train takes a run, and was given a configuration; pass it to load_config"):
        train("preset:tiny")  # as somebody may call it
