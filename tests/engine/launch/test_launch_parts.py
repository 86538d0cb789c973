"""Threads, devices, exit codes and the first cause: the pure parts of the launcher."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_run.errors import DataError, ExitCode, InputError, PluginError
from megatron_run_engine.launch.cause import RankEnd, describe, first_cause, last_line
from megatron_run_engine.launch.device import Setting, choose_device, deterministic_environment, explain_device
from megatron_run_engine.launch.failure import exit_code, one_line
from megatron_run_engine.launch.job import Report
from megatron_run_engine.launch.threads import (
    BRIEFLY,
    KEEPING,
    _has_glibc,
    _quota,
    available_cores,
    rank_environment,
    threads_per_rank,
)
from megatron_run_engine.runtime.world import StopRequest, World


@pytest.mark.parametrize(
    ("setting", "ranks", "cores", "threads"), [("auto", 2, 8, 4), ("auto", 3, 8, 2), ("auto", 8, 2, 1), (5, 8, 2, 5)]
)
def test_threads_are_cores_over_local_ranks(setting: int, ranks: int, cores: int, threads: int) -> None:
    assert threads_per_rank(setting, ranks, cores) == threads


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("400000 100000", 4), ("50000 100000", 1), ("?", None)]
)
def test_a_containers_quota_limits_the_cores(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert _quota(tmp_path / "cpu.max") == cores
    assert available_cores() >= 1


@pytest.mark.parametrize(
    ("told", "threads", "expected"),
    [
        ({}, 4, (None, BRIEFLY)),
        ({}, 5, ("passive", None)),
        ({"OMP_WAIT_POLICY": "active"}, 4, ("active", None)),
        ({"OMP_WAIT_POLICY": "active"}, 5, ("active", None)),
        ({"GOMP_SPINCOUNT": "7"}, 4, (None, "7")),
    ],
)
def test_waiting_threads_spin_briefly_and_not_at_all_when_there_are_more_than_cores_unless_told_otherwise(
    told: dict[str, str], threads: int, expected: tuple[str | None, str | None]
) -> None:
    environment = rank_environment(told, threads=threads, local_size=2, cores=8)
    assert (environment.get("OMP_WAIT_POLICY"), environment.get("GOMP_SPINCOUNT")) == expected


def test_local_ranks_talk_over_the_loopback_interface_unless_told_otherwise() -> None:
    assert rank_environment({}, 1, 1, 1)["GLOO_SOCKET_IFNAME"] == ("lo0" if sys.platform == "darwin" else "lo")
    assert rank_environment({"GLOO_SOCKET_IFNAME": "eth0"}, 1, 1, 1)["GLOO_SOCKET_IFNAME"] == "eth0"


def test_torchs_warnings_about_peers_are_kept_back_unless_told_otherwise() -> None:
    assert rank_environment({}, 1, 1, 1)["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert rank_environment({"TORCH_CPP_LOG_LEVEL": "INFO"}, 1, 1, 1)["TORCH_CPP_LOG_LEVEL"] == "INFO"


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ({}, KEEPING),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, f"glibc.pthread.rseq=0:{KEEPING}"),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, "glibc.malloc.check=1"),
        ({"MALLOC_ARENA_MAX": "1"}, None),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, None),
    ],
)
def test_freed_memory_is_kept_unless_the_allocator_was_told_otherwise(
    told: dict[str, str], kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_run_engine.launch.threads._has_glibc", lambda: True)
    assert rank_environment(told, 1, 1, 1).get("GLIBC_TUNABLES") == kept


def test_another_allocator_than_glibcs_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.confstr_names", {})  # as on macOS
    assert "GLIBC_TUNABLES" not in rank_environment({}, 1, 1, 1)


@pytest.mark.multiproc
@pytest.mark.skipif(not _has_glibc(), reason="the allocator is not glibc's")
def test_glibc_understands_that_it_must_keep_what_is_freed() -> None:
    """Of 64 MiB that were written and freed, none stay without the settings and nearly all with them."""
    program = """if True:
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        before, block = resident(), b"1" * 2**26
        del block
        print(resident() - before)
    """
    told = {"PATH": "", **rank_environment({}, 1, 1, 1)}
    for environment, least, most in (({}, 0, 2**22), (told, 2**25, 2**28)):
        found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        assert least <= max(0, int(found.stdout)) <= most


def place(launcher: str) -> World:
    return World(rank=1, size=4, local_rank=1, local_size=4, launcher=launcher, host="here")


@pytest.mark.parametrize(
    ("launcher", "setting", "gpus", "device"),
    [
        ("local", "auto", 4, "cuda:1"),
        ("local", "cuda", 4, "cuda:1"),
        ("local", "cpu", 8, "cpu"),
        ("local", "auto", 3, "cpu"),
        ("local", "auto", 1, "cpu"),
        ("slurm", "auto", 4, "cuda:1"),
        ("slurm", "auto", 1, "cuda:0"),  # srun --gpus-per-task=1
        ("slurm", "cuda", 1, "cuda:0"),
        ("torchrun", "auto", 1, "cuda:0"),
        ("slurm", "cpu", 1, "cpu"),
        ("slurm", "auto", 0, "cpu"),
    ],
)
def test_a_gpu_is_taken_when_every_local_rank_gets_one(launcher: str, setting: Setting, gpus: int, device: str) -> None:
    assert choose_device(setting, place(launcher), gpus) == device


@pytest.mark.parametrize(
    ("launcher", "setting", "gpus"),
    [("local", "cuda", 1), ("slurm", "auto", 2), ("torchrun", "auto", 3), ("slurm", "cuda", 0)],
)
def test_too_few_gpus_are_refused_with_what_to_type(launcher: str, setting: Setting, gpus: int) -> None:
    with pytest.raises(
        InputError, match=f"run.device={setting} needs 4 GPUs on here: {gpus} found; set run.device=cpu"
    ):
        choose_device(setting, place(launcher), gpus)


def test_training_on_the_cpu_for_want_of_gpus_is_said() -> None:
    assert explain_device("auto", place("local"), 1) == "training on the CPU: 4 local ranks, 1 GPU"
    assert explain_device("auto", place("slurm"), 0) == "training on the CPU: no GPU on here"
    assert explain_device("auto", place("local"), 0) == explain_device("cpu", place("slurm"), 0) == ""
    assert explain_device("auto", place("slurm"), 1) == ""


def test_deterministic_kernels_on_a_gpu_need_cublas_told() -> None:
    assert deterministic_environment(True, "cuda:0") == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert deterministic_environment(None, "cuda:0") == deterministic_environment(True, "cpu") == {}


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
    errors = ValueError("x"), MemoryError(), RuntimeError("gloo: Connection closed by peer")
    for error, line in zip(
        errors,
        (
            "ValueError: x (in rank 1, action 2, F1.0)",
            "the host ran out of memory (from rank 1, action 2, F1.0); lower",
            "another rank was lost: gloo: Connection closed by peer (from rank 1, action 2, F1.0)",
        ),
        strict=True,
    ):
        error.add_note("rank 1, action 2, F1.0")
        assert one_line(error).startswith(line)


def test_the_first_to_ask_for_a_stop_decides_the_code() -> None:
    stop = StopRequest()
    assert stop.requested is None
    stop.stop(ExitCode.SIGTERM)
    stop.stop(ExitCode.SIGINT)
    assert stop.requested == ExitCode.SIGTERM


def end(rank: int, status: int, order: int, *, killed: bool = False, report: Report | None = None) -> RankEnd:
    return RankEnd(rank, status, order, Path(f"{rank}.log"), report, killed)


def test_the_first_cause_is_never_what_another_rank_caused() -> None:
    lost = Report(4, "another rank was lost", secondary=True)
    ends = [end(0, 4, 0, report=lost), end(1, -9, 1), end(2, -9, 2, killed=True), end(3, 0, 3)]
    assert first_cause(ends) is ends[1]
    assert first_cause(ends[:1] + ends[2:]) is ends[0]
    assert first_cause(ends[3:]) is None


def test_a_rank_that_said_nothing_is_described_by_the_first_that_missed_it() -> None:
    missed = [Report(4, f"rank {rank} (stage {rank}) is lost", secondary=True, lost=rank) for rank in (2, 1)]
    ends = [end(0, 4, 2, report=missed[1]), end(1, 4, 1, report=missed[0]), end(2, -9, 0)]
    assert describe(ends[2], ends) == "a rank was killed by SIGKILL (rank 2, log: 2.log); rank 2 (stage 2) is lost"
    assert describe(ends[2], ends[:1] + ends[2:]) == "a rank was killed by SIGKILL (rank 2, log: 2.log)"


def test_of_ranks_that_miss_each_other_the_one_that_misses_a_silent_rank_knows_the_cause() -> None:
    reports = [Report(4, f"rank {rank + 1} is lost", secondary=True, lost=rank + 1) for rank in range(3)]
    ends = [end(rank, 4, rank, report=report) for rank, report in enumerate(reports)]
    ends.append(end(3, -9, 3, killed=True))
    assert first_cause(ends) is ends[2]
    assert describe(ends[2], ends) == "rank 3 is lost (rank 2, log: 2.log); rank 3 did not end and was killed"
    stuck = [*ends[:2], end(2, -9, 2, killed=True), ends[3]]
    assert describe(stuck[1], stuck).endswith("; ranks 2, 3 did not end and were killed")


def test_the_earlier_of_two_causes_is_the_first() -> None:
    ends = [end(0, 3, 1), end(1, 2, 0)]
    assert first_cause(ends) is ends[1]


def test_several_problems_keep_their_lines() -> None:
    failed = end(0, 2, 0, report=Report(2, "one\ntwo"))
    assert describe(failed, [failed]) == "one (log: 0.log)\ntwo"


def test_the_last_line_of_a_log_is_found_without_reading_all_of_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100_000 + "\nEnde gut, alles g\u00fct\n\n  \n".encode())
    assert last_line(log) == "Ende gut, alles g\u00fct"
    assert last_line(tmp_path / "none") == ""
