"""A run whose steps lie in memory too: it goes on from there bit for bit, and leaves nothing when it has ended."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_run.errors import CheckpointError, ExitCode, GuardError, InputError
from megatron_run.planning import ResolvedRun, load_config
from megatron_run_cli.reports.dry_run import dry_run_json, dry_run_text
from megatron_run_engine.checkpoint.files import MemoryFiles, NewFile
from megatron_run_engine.checkpoint.memory_folder import disk_under
from megatron_run_engine.checkpoint.memory_home import MemoryHome
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_engine.estimate.room_for_copies import check_folder, check_room
from megatron_run_engine.launch import LaunchOptions, launch
from megatron_run_engine.launch.attempts import checked
from megatron_run_engine.training.state import checkpointing, resuming
from tests.support.resuming import SMALL, Attempt, attempt
from tests.support.saved_steps import read_all, same_state
from tests.support.training_bench import Bench

RUN = "0123456789abcdef" * 2
#: fp16 with overflows: the scaler has state too.
SETS = {
    **SMALL,
    "train.steps": 9,
    "train.precision": "fp16",
    "scaler.initial_loss_scale": 2.0**22,
    "scaler.loss_scale_window": 2,
    "scaler.hysteresis": 1,
    "checkpoint.interval": 5,
    "checkpoint.memory_interval": 2,
}


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The memory of this host, by a variable of its environment."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("HOST_MEMORY", str(memory))
    return memory


def named(folder: Path) -> Path:
    """A run folder with a name for its run."""
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"id": RUN}))
    return folder


def in_memory(folder: Path) -> list[int]:
    return MemoryHome(Path(os.environ["HOST_MEMORY"]), RUN, folder).steps.steps()


def dies_in(step: int) -> Callable[[int], None]:
    def die(done: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    return die


def trained(folder: Path, sets: dict[str, Any] | None = None, **asked: Any) -> Attempt:
    return attempt(named(folder), {**SETS, "checkpoint.memory_folder": "$HOST_MEMORY", **(sets or {})}, **asked)


def died(folder: Path, step: int, sets: dict[str, Any] | None = None, **asked: Any) -> None:
    """A run that ended within ``step`` without a word, once the steps before it were saved."""
    with pytest.raises(KeyboardInterrupt):
        trained(folder, sets, each_step=dies_in(step), **asked)


def test_a_run_that_died_goes_on_from_memory_bit_for_bit_and_leaves_nothing_at_its_end(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", {"checkpoint.memory_interval": 0})
    assert not (tmp_path / "memory").joinpath(f"megatron-run-{os.geteuid()}").exists()
    died(tmp_path / "run", 9)
    assert in_memory(tmp_path / "run") == [6, 8]
    went_on = trained(tmp_path / "run", number=2)
    assert (went_on.first, went_on.saved) == (9, [9])
    assert went_on.numbers[9] == whole.numbers[9]
    found = [Checkpoints(tmp_path / name / "checkpoints") for name in ("whole", "run")]
    assert same_state(*(read_all(each, 9) for each in found))
    assert not MemoryHome(tmp_path / "memory", RUN, tmp_path / "run").path.exists()


def test_a_step_on_disk_that_is_newer_is_taken_and_of_the_same_one_that_in_memory(tmp_path: Path) -> None:
    resume, loaded = resuming.resume, list[Path]()

    def watched(run: Any, assembly: Any, checkpoints: Checkpoints, *others: Any) -> Any:
        loaded.append(checkpoints.path)
        return resume(run, assembly, checkpoints, *others)

    with mock.patch.object(checkpointing, "resume", watched):
        for name, interval in (("newer", 4), ("same", 5)):
            sets = {"checkpoint.memory_interval": interval}
            died(tmp_path / name, 7, sets)
            assert in_memory(tmp_path / name) == [interval]
            assert trained(tmp_path / name, sets, number=2).first == 6
    memory = MemoryHome(tmp_path / "memory", RUN, tmp_path).path
    assert loaded == [tmp_path / "newer" / "checkpoints", memory]


def test_a_step_that_is_asked_for_and_is_in_memory_alone_is_refused_with_what_takes_it(tmp_path: Path) -> None:
    died(tmp_path / "run", 9)
    assert in_memory(tmp_path / "run") == [6, 8]
    with pytest.raises(CheckpointError, match=r"step 6 is not on disk, .* step 8, the newest .*: --resume auto$"):
        trained(tmp_path / "run", number=2, resume="6")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*step7; saved steps: 5$"):
        trained(tmp_path / "run", number=2, resume="7")
    assert trained(tmp_path / "run", number=3).first == 9, "nothing was forgotten"


def test_a_step_that_is_asked_for_is_that_on_disk_and_memory_forgets_what_comes_after(tmp_path: Path) -> None:
    died(tmp_path / "run", 9)
    died(tmp_path / "run", 6, number=2, resume="5")
    assert in_memory(tmp_path / "run") == [], "6 and 8 were of the steps that are done again"
    died(tmp_path / "run", 9, number=3)
    died(tmp_path / "run", 2, number=4, resume="never")
    assert in_memory(tmp_path / "run") == []
    died(tmp_path / "run", 9, number=5)
    died(tmp_path / "run", 6, {"checkpoint.memory_interval": 0}, number=6, resume="5")
    assert in_memory(tmp_path / "run") == [], "nor does an attempt without memory leave them to the next"


@pytest.mark.parametrize(("step", "first"), [(8, 9), (6, 7), (5, 6)])
def test_steps_that_other_hosts_have_gone_back_behind_are_not_taken_for_the_newest(
    tmp_path: Path, step: int, first: int
) -> None:
    """A host that was away while the run went on from ``step`` still holds what was undone."""
    died(tmp_path / "run", 9)
    assert in_memory(tmp_path / "run") == [6, 8]
    begun = [{"attempt": 1, "step": 0}, {"attempt": 2, "step": step}, {"attempt": 3}]
    (tmp_path / "run" / "run.json").write_text(json.dumps({"id": RUN, "attempts": begun}))
    again = attempt(tmp_path / "run", {**SETS, "checkpoint.memory_folder": "$HOST_MEMORY"}, number=4)
    assert again.first == first


def test_a_run_that_is_stopped_has_its_step_on_disk_and_none_in_memory(tmp_path: Path) -> None:
    stopped = trained(tmp_path / "run", stop_after=4)
    assert (stopped.code, stopped.saved) == (ExitCode.SIGTERM, [4])
    assert in_memory(tmp_path / "run") == []


def test_a_lying_step_is_named_and_the_one_before_it_taken(tmp_path: Path) -> None:
    died(tmp_path / "run", 9)
    (shard,) = MemoryHome(tmp_path / "memory", RUN, tmp_path / "run").steps.folder(8).glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert trained(tmp_path / "run", number=2).first == 7


def test_a_run_does_not_begin_with_the_zeros_by_which_it_has_asked_what_it_reads(tmp_path: Path) -> None:
    """A host lacked files, and what came was damaged: no step is left, nor the initial values."""
    sets = {"checkpoint.interval": 0}
    whole = trained(tmp_path / "whole", {**sets, "checkpoint.memory_interval": 0})
    died(tmp_path / "run", 9, sets)

    def find(survivors: Any, _: int, read_by: Callable[[Any], Any]) -> None:
        home = survivors._home
        assert read_by(home.steps.manifest(8))
        home.forget(None)

    with (
        mock.patch("megatron_run_engine.training.state.memory_tier.Survivors.find", find),
        pytest.raises(CheckpointError, match="step 8 in memory is not what it was, and no other step is saved"),
    ):
        trained(tmp_path / "run", sets, number=2)
    again = trained(tmp_path / "run", sets, number=3)
    assert (again.first, again.numbers) == (1, whole.numbers)


def test_a_step_for_which_a_host_has_no_room_is_not_lost_by_a_new_beginning(tmp_path: Path) -> None:
    """No other step is saved, and room can be made."""
    sets = {"checkpoint.interval": 0}
    died(tmp_path / "run", 9, sets)

    def find(survivors: Any, _: int, read_by: Callable[[Any], Any]) -> None:
        assert read_by(survivors._home.steps.manifest(8))
        survivors.lacks_room = "rank 2: No space left on device: /dev/shm/x"

    with (
        mock.patch("megatron_run_engine.training.state.memory_tier.Survivors.find", find),
        pytest.raises(CheckpointError) as refusal,
    ):
        trained(tmp_path / "run", sets, number=2)
    assert str(refusal.value) == (
        "step 8 in memory cannot be used, and no other step is saved: a host has no room for what it lacks of it: "
        "rank 2: No space left on device: /dev/shm/x; make room there and run the same command again, or start again: "
        "--resume never"
    )
    assert trained(tmp_path / "run", sets, number=3).first == 9


def bench(folder: Path, *sets: str) -> Bench:
    named(folder)
    given = (f"{key}={value}" for key, value in SMALL.items())
    return Bench(folder, *given, "checkpoint.memory_folder=$HOST_MEMORY", *sets, again=True)


def test_a_rewind_goes_back_to_the_disk_and_memory_with_it(tmp_path: Path) -> None:
    sets = ("train.steps=12", "guard.spike=rewind", "guard.spike_window=8", "eval.interval=0")
    rewinding = bench(tmp_path / "run", *sets, "checkpoint.interval=8", "checkpoint.memory_interval=3")
    rewinding.spoil_losses(lambda begun, _, total: total * 9 if begun == 11 else total)
    held: dict[int, list[int]] = {}
    rewinding.watch.after_step = lambda: held.setdefault(len(rewinding.watch.steps), in_memory(tmp_path / "run"))
    rewinding.train()
    assert [step.step for step in rewinding.watch.steps] == [*range(1, 12), *range(9, 13)]
    assert held[12] == [6], "9 is of the steps that were undone"


def test_what_a_guard_has_judged_wrong_is_not_kept(tmp_path: Path) -> None:
    stopping = bench(tmp_path / "run", "train.steps=12", "guard.nan_loss=stop", "checkpoint.memory_interval=2")
    stopping.spoil_losses(lambda begun, _, total: total * float("nan") if begun == 6 else total)
    with pytest.raises(GuardError) as failure:
        stopping.train()
    assert 2 in in_memory(tmp_path / "run")
    stopping.trainer.close(failure.value)
    assert in_memory(tmp_path / "run") == []


def test_memory_that_is_full_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    class Memory(MemoryFiles):
        def create(self, path: Path) -> NewFile:
            if path.parent.name in {".tmp-step4", ".tmp-step6"}:
                raise OSError(28, os.strerror(28), str(path))
            return super().create(path)

    with mock.patch("megatron_run_engine.checkpoint.memory_saver.MemoryFiles", Memory):
        run = bench(tmp_path / "run", "train.steps=12", "checkpoint.memory_interval=2")
        run.train()
    full, again = run.said
    assert full.startswith("step 4 could not be saved in memory: No space left on device: ")
    assert full.endswith("; make room or write access there; training goes on, and the next step is tried")
    assert again == "steps are saved in memory again"
    assert len(run.watch.steps) == 12


def test_memory_without_room_for_two_steps_is_refused_before_a_rank_starts_with_what_to_type(memory: Path) -> None:
    sets = ("checkpoint.memory_interval=2", f"checkpoint.memory_folder={memory}", "parallel.pipeline=1")
    run = load_config("preset:tiny", plugins=("schedule=gpipe",), sets=sets, nproc=2)
    size, free = model_size(run), SimpleNamespace(f_bavail=1, f_frsize=0)
    (stage,) = size.stages
    free.f_frsize = saved = 2 * stage.memory["host_steps"]
    assert stage.memory["staging"] == stage.memory["host_steps"] / 2
    with mock.patch("os.statvfs", return_value=free):
        check_room(run, size, range(2))
        check_room(run, size, range(1))  # which keeps the copies of the other one's
        free.f_frsize = saved - 1
        for local in (range(2), range(1)):
            with pytest.raises(InputError):
                check_room(run, size, local)
        with pytest.raises(InputError) as refusal:
            launch(run.request, LaunchOptions(quiet=True), "local")
    said = str(refusal.value)
    assert said.startswith(f"{memory} has no room for two steps of the 2 ranks of this host: they take ")
    assert "--set checkpoint.memory_interval=0" in said


def test_room_is_what_this_run_has_and_removes_and_not_what_other_runs_keep(tmp_path: Path, memory: Path) -> None:
    """Of other runs: one that is finished, and one that was lost and may go on."""
    sets = ("checkpoint.memory_interval=2", f"checkpoint.memory_folder={memory}", f"run.folder={tmp_path / 'run'}")
    run = load_config("preset:tiny", sets=(*sets, "parallel.pipeline=1"), plugins=("schedule=gpipe",), nproc=1)
    size = model_size(run)
    (stage,) = size.stages
    needed = stage.memory["host_steps"]

    def keeps(letter: str, folder: Path, state: str = "failed") -> None:
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"id": letter * 32}))
        (folder / "status.json").write_text(json.dumps({"state": state}))
        home = MemoryHome(memory, letter * 32, folder)
        home.make()
        home.steps.folder(5).mkdir()
        with (home.steps.folder(5) / "shard").open("wb") as file:
            file.truncate(needed)

    with mock.patch("os.statvfs", return_value=SimpleNamespace(f_bavail=1, f_frsize=needed - 1)):
        keeps("a", tmp_path / "other")
        with pytest.raises(InputError, match="has no room for two steps"):
            check_room(run, size, range(1))
        keeps("b", tmp_path / "finished", "finished")
        check_room(run, size, range(1))
        shutil.rmtree(memory / f"megatron-run-{os.geteuid()}" / ("b" * 32))
        keeps("c", tmp_path / "run")
        check_room(run, size, range(1))


def unset(memory: Path) -> str:
    return "$NOWHERE/x"


def missing(memory: Path) -> str:
    return "/not/there"


def linked(memory: Path) -> str:
    (memory / f"megatron-run-{os.geteuid()}").symlink_to(memory)
    return str(memory)


def entered(memory: Path) -> str:
    (memory / f"megatron-run-{os.geteuid()}").mkdir(mode=0o755)
    return str(memory)


def copied(memory: Path) -> str:
    """The home of a run of which the run folder is a copy."""
    MemoryHome(memory, RUN, named(memory.parent / "original")).make()
    return str(memory)


#: What is wrong with a folder for steps in memory, and the words that say so.
BAD: Mapping[Callable[[Path], str], str] = {
    unset: "its environment does not set NOWHERE",
    missing: "there is no folder /not/there",
    linked: "it is a symbolic link to",
    entered: "others may enter it: its mode is 0755",
    copied: "is a copy of it",
}


def asks_for(folder: str, *sets: str) -> ResolvedRun:
    asked = ("checkpoint.memory_interval=2", f"checkpoint.memory_folder={folder}", "parallel.pipeline=1", *sets)
    return load_config("preset:tiny", sets=asked, plugins=("schedule=gpipe",), nproc=2)


def refused(work: Callable[[], object]) -> str:
    with pytest.raises(InputError) as refusal:
        work()
    return str(refusal.value)


@pytest.mark.parametrize("bad", [*BAD])
def test_a_bad_folder_is_a_mistake_of_the_configuration_for_ranks_launcher_and_dry_run(
    tmp_path: Path, memory: Path, bad: Callable[[Path], str]
) -> None:
    folder = bad(memory)
    line = refused(lambda: trained(tmp_path / "run", {"checkpoint.memory_folder": folder}))
    assert BAD[bad] in line
    if bad is unset:
        assert not check_folder(asks_for(folder)), "other hosts may know it"
    elif bad is copied:
        assert refused(lambda: check_folder(asks_for(folder, f"run.folder={tmp_path / 'run'}"))) == line
    else:
        run = asks_for(folder)
        assert refused(lambda: launch(run.request, LaunchOptions(quiet=True), "local")) == line
        assert refused(lambda: dry_run_text(run)) == line
        with mock.patch("megatron_run_engine.estimate.model_size.why_not_built", return_value="it needs a GPU"):
            assert refused(lambda: dry_run_text(run)) == line


def test_a_folder_in_which_nobody_may_write_is_a_mistake_of_the_configuration(tmp_path: Path, memory: Path) -> None:
    with mock.patch("os.access", return_value=False):
        line = refused(lambda: check_folder(asks_for(str(memory))))
    assert line.startswith(f"{memory} cannot hold steps in memory: this user may not write there; ")
    denied = PermissionError(13, os.strerror(13), str(memory))
    with mock.patch.object(MemoryFiles, "make_folder", side_effect=denied):
        line = refused(lambda: trained(tmp_path / "run", {"checkpoint.memory_folder": memory}))
    assert f"cannot hold steps in memory: Permission denied: {memory}; " in line


@pytest.mark.parametrize(("kind", "on_disk"), [("tmpfs", False), ("ramfs", False), ("ext4", True), ("nfs4", True)])
def test_steps_in_memory_that_lie_on_a_disk_are_noticed(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, kind: str, on_disk: bool
) -> None:
    place = memory / "a mount"
    place.mkdir()
    mounts = tmp_path / "mountinfo"
    escaped = str(place).replace(" ", "\\040")
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - xfs /dev/sda1 rw\n"
        f"23 22 0:5 / {escaped} rw - fuse /dev/sdb rw\n"
        f"24 22 0:6 / {escaped} rw,nosuid shared:2 master:1 - {kind} none rw\n"
        f"25 22 0:7 / {escaped}x rw - btrfs /dev/sdc rw\n"
    )
    monkeypatch.setattr("megatron_run_engine.checkpoint.memory_folder._MOUNTS", mounts)
    sets = ("checkpoint.memory_interval=2", f"checkpoint.memory_folder={place}", "parallel.pipeline=1")
    run = load_config("preset:tiny", sets=sets, plugins=("schedule=gpipe",))
    line = f"checkpoint.memory_interval keeps steps in {place}, which is no memory but a disk ({kind})"
    assert [line in notice for notice in checked(run).notices if "no memory" in notice] == [True] * on_disk
    assert (f"note: {line}: name a folder of a tmpfs" in dry_run_text(run)) == on_disk
    assert any(line in notice for notice in dry_run_json(run)["notices"]) == on_disk
    mounts.unlink()
    assert not disk_under(place), "nobody knows"
