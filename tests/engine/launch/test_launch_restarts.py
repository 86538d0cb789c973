"""When local ranks are started again by themselves, and with what."""

from __future__ import annotations

import json
from pathlib import Path
from socket import gethostname

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode, InputError
from megatron_run.files.latest_run import point_latest_at
from megatron_run.planning import ResolvedRun, load_config, resolve
from megatron_run.planning.run_text import hand_over, take_over
from megatron_run_engine.checkpoint.memory_home import MemoryHome
from megatron_run_engine.launch import LaunchOptions, RunResult, launch
from megatron_run_engine.launch.api import _of_size
from megatron_run_engine.launch.failures import in_memory, what_is_saved
from megatron_run_engine.launch.job import Job, Lost
from megatron_run_engine.launch.restarts import Restarts, resumed
from megatron_run_engine.run_folder.excluded import NAME
from megatron_run_engine.runtime.world import World

LOST = RunResult(ExitCode.RANK_LOST, None, "rank 1 hangs", steps=3)
LOST_AT_ONCE = RunResult(ExitCode.RANK_LOST, None, "rank 1 hangs")


def tried(most: int, *results: RunResult) -> list[bool]:
    restarts = Restarts(most)
    return [restarts.next(result) is not None for result in results]


def test_a_lost_rank_is_followed_by_as_many_starts_as_were_allowed() -> None:
    assert tried(2, LOST, LOST, LOST) == [True, True, False]
    assert tried(0, LOST) == [False]


@pytest.mark.parametrize("code", [code for code in ExitCode if code != ExitCode.RANK_LOST])
def test_no_other_end_is_followed_by_a_start(code: ExitCode) -> None:
    assert tried(5, RunResult(code, None, "", steps=3)) == [False]


def test_a_rank_that_is_lost_again_before_a_step_is_done_is_not_tried_a_third_time() -> None:
    assert tried(9, LOST_AT_ONCE, LOST_AT_ONCE) == [True, False]
    assert tried(9, LOST_AT_ONCE, LOST, LOST_AT_ONCE, LOST) == [True] * 4


def elastic(*results: RunResult, most: int = 9) -> list[tuple[int, ...] | None]:
    """The places that are left after each of ``results`` of four ranks, None where nothing is started again."""
    restarts, left = Restarts(most, full=4, elastic=True), []
    for result in results:
        left.append(restarts.left if restarts.next(result) is not None else None)
        restarts.places = restarts.left
    return left


def lost(rank: int | None, steps: int = 0, begun: int = 0) -> RunResult:
    return RunResult(ExitCode.RANK_LOST, None, "lost", steps, rank, begun=begun)


ALL = (0, 1, 2, 3)


def test_a_place_that_is_lost_twice_before_a_step_is_left_out() -> None:
    assert elastic(lost(1, steps=3), lost(1), lost(1)) == [ALL, ALL, (0, 2, 3)]
    assert elastic(lost(1), lost(2), lost(1), lost(1)) == [ALL, ALL, (0, 2, 3), (0, 3)], "rank 1 of three is place 2"
    assert elastic(*[lost(0)] * 8, most=8)[-2:] == [(3,), None], "nobody is left"


def test_steps_that_are_done_again_are_no_progress() -> None:
    again = [lost(1, steps=3, begun=4)] * 3
    assert elastic(*again) == [ALL, ALL, (0, 2, 3)]
    assert elastic(*again, lost(0, steps=3, begun=5)) == [ALL, ALL, (0, 2, 3), ALL]
    assert tried(9, *again) == [True] * 3, "nobody else can do without it, and it may be chance"


def test_after_progress_all_places_are_tried_again() -> None:
    assert elastic(lost(3), lost(3), lost(0, steps=1), lost(3), lost(3)) == [ALL, (0, 1, 2), ALL, ALL, (0, 1, 2)]


def test_a_loss_of_nobody_knows_whom_is_not_tried_a_third_time() -> None:
    assert elastic(lost(None), lost(None)) == [ALL, None]


def test_the_line_names_the_place_that_is_left_out_and_the_return_of_all() -> None:
    restarts = Restarts(9, full=2, elastic=True)
    lines = [restarts.next(each) for each in (lost(1), lost(1), lost(0, steps=2))]
    assert [str(line).partition("first step")[2] for line in lines] == [
        "",
        ", without local rank 1, which was lost 2 times before a new step was done",
        ", on all 2 ranks again",
    ]


def excluding(folder: Path, *places: int) -> None:
    ranks = [{"host": gethostname(), "place": place} for place in places]
    (folder / NAME).write_text(json.dumps({"ranks": [*ranks, {"host": "elsewhere", "place": 2}]}))


def test_places_that_the_run_folder_excludes_are_left_out_whatever_progress_is_made(tmp_path: Path) -> None:
    restarts = Restarts(9, full=4, elastic=True)
    assert (restarts.leave_out(None), restarts.leave_out(tmp_path), [*restarts.left]) == ("", "", [*ALL])
    excluding(tmp_path, 1)
    line = f"excluded.json in the run folder leaves out local rank 1 of {gethostname()}, until it is taken out there"
    assert [restarts.leave_out(tmp_path), restarts.leave_out(tmp_path)] == [line, ""], "it is said once"
    restarts.places = restarts.left
    assert [*restarts.left] == [0, 2, 3]
    for loss in (lost(1), lost(1)):  # rank 1 of those three has place 2
        assert restarts.next(loss)
    assert [*restarts.left] == [0, 3]
    assert str(restarts.next(lost(0, steps=3))).endswith(", on all 3 ranks again")
    excluding(tmp_path, 0, 1, 2, 3)
    with pytest.raises(InputError, match="no rank is left to train on"):
        restarts.leave_out(tmp_path)
    (tmp_path / NAME).unlink()
    assert (restarts.leave_out(tmp_path), [*restarts.left]) == ("", [*ALL])


def test_a_run_that_is_not_elastic_takes_excluded_ranks_all_the_same_and_says_so(tmp_path: Path) -> None:
    restarts = Restarts(9, full=4)
    excluding(tmp_path, 1, 2)
    line, host = restarts.leave_out(tmp_path), gethostname()
    assert line.endswith(
        f" names local rank 1 of {host} and local rank 2 of {host}, which run.elastic=off takes all the same"
    )
    assert restarts.left == ALL


def test_a_rank_keeps_its_place_where_others_are_left_out() -> None:
    job = Job("", Path(), 1, 2, places=(0, 3))
    numbers = [{key: job.variables(rank)[key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE")} for rank in range(2)]
    assert numbers[1] == {"RANK": "1", "LOCAL_RANK": "3", "WORLD_SIZE": "2"}
    assert numbers[0]["LOCAL_RANK"] == "0"
    assert job.variables(1)["LOCAL_WORLD_SIZE"] == "4"


def test_a_program_in_a_world_of_fewer_ranks_trains_on_those() -> None:
    sets = {"run.elastic": "data", "train.global_batch_size": 12, "train.micro_batch_size": 1}
    run = load_config("preset:tiny", sets=sets, nproc=4)
    assert _of_size(run, World(0, 3, launcher="torchrun")).sizes.data == 3
    assert _of_size(run, World(0, 5, launcher="torchrun")).spares == 1
    fixed = load_config("preset:tiny", nproc=4)
    with pytest.raises(InputError, match=r"or set run\.elastic"):
        _of_size(fixed, World(0, 3, launcher="torchrun"))


def test_the_line_counts_the_starts_and_says_from_where(tmp_path: Path) -> None:
    restarts = Restarts(2)
    assert restarts.next(LOST) == "rank 1 hangs; starting again, 1 of 2, from the first step"
    for step in (5, 20, 10):
        (tmp_path / "checkpoints" / f"step{step}").mkdir(parents=True)
    result = RunResult(ExitCode.RANK_LOST, tmp_path, "", steps=1)
    assert restarts.next(result) == "ended with exit code 4; starting again, 2 of 2, from step 20"


def test_the_line_says_how_long_it_took_to_see_and_that_memory_has_a_newer_step(tmp_path: Path) -> None:
    lost = RunResult(ExitCode.RANK_LOST, tmp_path, "rank 1 died", steps=3, lost=Lost(10.0, 10.5, 12.0))
    said = "rank 1 died; starting again, 1 of 1, from step 7 in memory (seen after 0.50 s, all ranks gone 1.50 s later)"
    assert Restarts(1).next(lost, 7) == said


def test_a_run_that_failed_says_what_memory_has_beyond_the_disk(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step5").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"id": "f" * 32}))
    sets = ("checkpoint.memory_interval=2", f"checkpoint.memory_folder={tmp_path}")
    run, lost = resolve(Request(configs=("preset:tiny",), sets=sets)), RunResult(ExitCode.RANK_LOST, tmp_path / "run")
    home = MemoryHome(tmp_path, "f" * 32, tmp_path / "run")
    home.make()
    assert what_is_saved(run, lost) == "step 5 is saved"
    home.steps.folder(4).mkdir()
    assert what_is_saved(run, lost) == "step 5 is saved", "the disk has a newer one"
    home.steps.folder(8).mkdir()
    assert what_is_saved(run, lost) == "step 8 is in memory, until this machine ends, and step 5 on disk"
    assert in_memory(run, lost) == 8


def test_what_goes_on_is_the_same_run_in_the_same_folder_from_its_newest_step(tmp_path: Path) -> None:
    run = resumed(resolve(Request(configs=("preset:tiny",), sets=("train.lr=0.5",), resume="10")), tmp_path)
    assert (run.config.run.folder, run.config.train.lr) == (tmp_path, 0.5)
    assert (run.request.resume, run.request.sets) == ("auto", ("train.lr=0.5",))


@pytest.mark.parametrize(("launcher", "advice"), [("torchrun", "torchrun --max-restarts N"), ("slurm", "--requeue")])
def test_ranks_that_somebody_else_has_started_are_theirs_to_start_again(
    monkeypatch: pytest.MonkeyPatch, launcher: str, advice: str
) -> None:
    world = World(0, 2, launcher=launcher)
    monkeypatch.setattr("megatron_run_engine.launch.api.find_world", lambda environment, mode: world)
    with pytest.raises(InputError) as failure:
        launch(Request(), LaunchOptions(max_restarts=1))
    assert str(failure.value).startswith(f"--max-restarts 1 in a world of {launcher}: ")
    assert advice in str(failure.value)


A, B = "20260101-000000-aaaa", "20260102-000000-bbbb"


def test_a_start_again_reads_the_run_that_was_the_latest_when_the_command_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_run_engine.launch.api.checked", lambda run: run)  # nothing is saved there
    (tmp_path / "runs").mkdir()
    point_latest_at(tmp_path / "runs" / A)
    read: list[Path | None] = []

    def lost_once(run: ResolvedRun, *_: object, **__: object) -> RunResult:
        point_latest_at(tmp_path / "runs" / B)  # as the first step of this very run does
        read.append(take_over(hand_over(run)).config.run.init_from)  # as its ranks do
        return RunResult(ExitCode.DONE if len(read) > 1 else ExitCode.RANK_LOST, tmp_path / "mine", "lost", steps=1)

    monkeypatch.setattr("megatron_run_engine.launch.attempts._attempt", lost_once)
    typed = Request(configs=("preset:tiny",), sets=("run.init_from=runs/latest",))
    assert launch(typed, LaunchOptions(max_restarts=1, tell=lambda _: None), "local").code is ExitCode.DONE
    assert read == [Path("runs", A)] * 2
