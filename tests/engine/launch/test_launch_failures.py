"""From an exception, or the way a rank ended, to the exit code and the line; and what that says of saved steps."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_run.config.request import Request
from megatron_run.errors import DataError, ExitCode, InputError, PluginError
from megatron_run.planning import load_config
from megatron_run_engine.launch import LaunchOptions, launch
from megatron_run_engine.launch.failures import (
    describe,
    exit_code,
    first_cause,
    how_to_resume,
    interrupted,
    last_line,
    last_saved,
    one_line,
)
from megatron_run_engine.launch.job import RankResult
from megatron_run_engine.launch.rank_output import last_log_line
from megatron_run_engine.launch.worker import RankWorker
from megatron_run_engine.run_folder import RunFolder, open_run_folder
from megatron_run_engine.runtime.world import World
from tests.support.resolving import resolved


def raised(work: Callable[[], object]) -> BaseException:
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("x"), 2),
        (PluginError("x"), 3),
        (SystemExit(), 3),
        (SystemExit(0), 3),
        (DataError("x"), 5),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 7),
        (MemoryError(), 7),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"), 4),
        (RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for recv"), 4),
        (dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed"), 4),
        (dist.DistStoreError("wait timeout after 600000ms"), 4),
        (KeyboardInterrupt(), 130),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 1),
        (RuntimeError("gloo: op.preamble.length <= op.nbytes. 20 vs 16"), 1),
        (RuntimeError("the tokenizer of a worker timed out"), 1),
        (ValueError("x"), 1),
    ],
)
def test_an_exception_becomes_its_documented_exit_code(error: BaseException, code: int) -> None:
    assert exit_code(error) == code
    assert "\n" not in one_line(error)


def test_a_tensor_that_no_host_can_hold_is_out_of_memory() -> None:
    assert exit_code(raised(lambda: torch.empty(2**60))) == ExitCode.OUT_OF_MEMORY


def test_a_bug_is_one_line_with_its_place() -> None:
    line = one_line(raised(lambda: {"a": 1}["missing"]))
    assert line.startswith("KeyError: 'missing' (in ")
    assert Path(__file__).name in line


def test_what_was_noted_on_an_exception_is_part_of_its_line() -> None:
    errors = ValueError("x"), MemoryError(), SystemExit("no licence"), RuntimeError("gloo: Connection closed by peer")
    for error, line in zip(
        errors,
        (
            "ValueError: x (in rank 1, action 2, F1.0)",
            "the host ran out of memory (from rank 1, action 2, F1.0); lower",
            "a plugin ended the process: SystemExit: no licence (from rank 1, action 2, F1.0); let it raise",
            "another rank was lost: gloo: Connection closed by peer (from rank 1, action 2, F1.0)",
        ),
        strict=True,
    ):
        error.add_note("rank 1, action 2, F1.0")
        assert one_line(error).startswith(line)


def end(
    rank: int, status: int, order: int, message: str = "", *, killed: bool = False, lost: int | None = None
) -> RankResult:
    """The result of a rank. It has reported when it has a ``message``, because of ``lost`` where its status says so."""
    return RankResult(
        rank,
        status,
        message,
        secondary=status == ExitCode.RANK_LOST,
        lost=lost,
        reported=bool(message),
        order=order,
        killed=killed,
        log=Path(f"{rank}.log"),
    )


def test_the_first_cause_is_never_what_another_rank_caused() -> None:
    ends = [end(0, 4, 0, "another rank was lost"), end(1, -9, 1), end(2, -9, 2, killed=True), end(3, 0, 3)]
    assert first_cause(ends) is ends[1]
    assert first_cause(ends[:1] + ends[2:]) is ends[0]
    assert first_cause(ends[3:]) is None


def test_a_rank_that_said_nothing_is_described_by_the_first_that_missed_it() -> None:
    missed = end(0, 4, 2, "rank 1 (stage 1) is lost", lost=1), end(1, 4, 1, "rank 2 (stage 2) is lost", lost=2)
    ends = [*missed, end(2, -9, 0)]
    assert describe(ends[2], ends) == "a rank was killed by SIGKILL (rank 2, log: 2.log); rank 2 (stage 2) is lost"
    assert describe(ends[2], ends[:1] + ends[2:]) == "a rank was killed by SIGKILL (rank 2, log: 2.log)"


def test_a_rank_that_is_killed_before_its_first_step_may_have_had_no_memory() -> None:
    told = [
        describe(replace(end(0, -9, 0), place=place), []) for place in ("start the model", "backward B0.0 of step 3")
    ]
    assert ["without memory: --dry-run counts" in line for line in told] == [True, False]


def test_of_ranks_that_miss_each_other_the_one_that_misses_a_silent_rank_knows_the_cause() -> None:
    ends = [end(rank, 4, rank, f"rank {rank + 1} is lost", lost=rank + 1) for rank in range(3)]
    ends.append(end(3, -9, 3, killed=True))
    assert first_cause(ends) is ends[2]
    assert describe(ends[2], ends) == "rank 3 is lost (rank 2, log: 2.log); rank 3 did not end and was killed"
    stuck = [*ends[:2], end(2, -9, 2, killed=True), ends[3]]
    assert describe(stuck[1], stuck).endswith("; ranks 2, 3 did not end and were killed")


def test_the_earlier_of_two_causes_is_the_first() -> None:
    ends = [end(0, 3, 1), end(1, 2, 0)]
    assert first_cause(ends) is ends[1]


def test_several_problems_keep_their_lines() -> None:
    failed = end(0, 2, 0, "one\ntwo")
    assert describe(failed, [failed]) == "one (log: 0.log)\ntwo"


def test_the_launcher_reads_what_a_rank_left_and_takes_the_status_from_its_process(tmp_path: Path) -> None:
    said = RankResult(1, 4, "rank 2 is lost", secondary=True, lost=2)
    said.write(tmp_path / "job.json")
    assert RankResult.read(tmp_path / "job.json", 1, 4) == said
    assert RankResult.read(tmp_path / "job.json", 1, -9) == replace(said, status=-9)


@pytest.mark.parametrize(("status", "secondary"), [(4, True), (1, False), (-9, False)])
def test_of_a_rank_that_left_nothing_only_the_code_says_that_another_was_lost(
    tmp_path: Path, status: int, secondary: bool
) -> None:
    expected = RankResult(0, status, secondary=secondary, reported=False)
    assert RankResult.read(tmp_path / "job.json", 0, status) == expected
    (tmp_path / "result-0.json").write_text("{")
    assert RankResult.read(tmp_path / "job.json", 0, status) == expected


def test_the_last_line_of_a_log_is_found_without_reading_all_of_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100_000 + "\nEnde gut, alles g\u00fct\n\n  \n".encode())
    assert last_log_line(log) == "Ende gut, alles g\u00fct"
    assert last_log_line(tmp_path / "none") == ""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with three saved steps, in a place whose name a shell would cut."""
    for step in (5, 20, 10):
        (tmp_path / "my runs" / "checkpoints" / f"step{step}").mkdir(parents=True)
    return tmp_path / "my runs"


def test_the_newest_step_counts_and_none_where_there_is_none(run: Path) -> None:
    assert (last_saved(run), last_saved(run.parent), last_saved(None)) == (20, None, None)


def test_a_shell_takes_what_to_type_as_it_stands(run: Path) -> None:
    words = how_to_resume(run).split("the same command with ")[1]
    assert shlex.split(words) == ["--set", f"run.folder={run}", "--resume", "auto"]


@pytest.mark.parametrize(
    ("folder", "resume", "added"),
    [
        ("my runs", "auto", ""),
        ("my runs", "never", " with --resume auto"),
        (None, "auto", " with --set 'run.folder={run}'"),
        ("latest", "5", " with --set 'run.folder={run}' --resume auto"),
    ],
)
def test_what_was_typed_is_not_to_be_typed_again(
    folder: str | None, resume: str, added: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = resolved(sets={"run.folder": folder} if folder else {})
    monkeypatch.chdir(run.parent)
    typed = replace(typed, request=replace(typed.request, resume=resume))
    assert how_to_resume(run, typed) == f"to resume from it, run the same command{added.format(run=run)}"
    assert how_to_resume(run, typed) in interrupted("stopped by SIGINT", run, typed)


def test_an_interrupted_run_says_what_is_saved_and_how_to_go_on_or_that_nothing_is(run: Path) -> None:
    assert interrupted("stopped by SIGINT", run) == (f"stopped by SIGINT: step 20 was saved last; {how_to_resume(run)}")
    for folder in (run.parent, None):
        assert interrupted("stopped", folder) == "stopped: no step was saved"


def test_only_an_interrupt_is_told_that_way(run: Path) -> None:
    assert last_line(KeyboardInterrupt(), run) == interrupted("interrupted", run)
    assert last_line(DataError("no data"), run) == "no data"


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("code", [ExitCode.INPUT, ExitCode.DATA])
def test_a_joined_rank_names_its_log_unless_rank_0_takes_the_start_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: ExitCode, begun: bool
) -> None:
    run = tmp_path / "run"

    def fail(worker: RankWorker) -> RankResult:
        with open_run_folder(load_config("preset:tiny", sets={"run.folder": run})).lock:
            if begun:
                RunFolder(run, 1).begin(0)
        worker.folder = RunFolder(run, 1, rank=1)
        os.close(worker._terminal)
        return RankResult(1, code, "a damaged document")

    monkeypatch.setattr("megatron_run_engine.launch.api.find_world", lambda *_: World(1, 2, launcher="torchrun"))
    monkeypatch.setattr(RankWorker, "run", fail)
    log = f", log: {run / 'logs' / 'attempt-001' / 'rank-00001.log'}" if begun else ""
    assert launch(Request(), LaunchOptions()).message == f"a damaged document (rank 1{log})"
