"""Threads and devices of a rank, and what is set in its process, on a GPU that is only imagined."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megatron_run.errors import InputError
from megatron_run.planning import ResolvedRun, load_config
from megatron_run_engine.runtime.world import World
from megatron_run_engine.training.process import (
    Setting,
    borrowed_process,
    choose_backend,
    choose_device,
    deterministic_environment,
    deterministic_kernels,
    explain_device,
    forks_ranks,
    rounded_products,
    start_device,
)
from megatron_run_engine.training.rank_environment import (
    KEEP_FREED,
    SPIN_BRIEFLY,
    _has_glibc,
    _quota,
    available_cores,
    rank_environment,
    threads_per_rank,
)

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def tiny(**sets: object) -> ResolvedRun:
    return load_config("preset:tiny", sets={f"run.{key}": value for key, value in sets.items()})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, str | None]]:
    """What is asked of CUDA, each with cuBLAS's variable at that moment."""
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())  # imports much: before the fakes
    asked: list[tuple[object, str | None]] = []

    def ask(device: object = "current") -> int:
        asked.append((device, os.environ.get(CUBLAS)))
        return 3

    monkeypatch.setattr(torch.cuda, "set_device", ask)
    monkeypatch.setattr(torch.cuda, "current_device", ask)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    monkeypatch.setenv(CUBLAS, "")  # so that it is restored after the test
    monkeypatch.delenv(CUBLAS)
    return asked


def test_cublas_is_told_before_cuda_starts(started: list[tuple[object, str | None]]) -> None:
    start_device(tiny(deterministic=True), "cuda:1")
    assert started == [(torch.device("cuda:1"), ":4096:8")]


def test_what_the_user_told_cublas_stays(
    started: list[tuple[object, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CUBLAS, ":16:8")
    with borrowed_process(tiny(deterministic=True), World(device="cuda:0")):
        assert os.environ[CUBLAS] == ":16:8"
    assert os.environ[CUBLAS] == ":16:8"


@pytest.mark.parametrize("deterministic", [None, False])
def test_cublas_is_told_nothing_unless_asked(
    started: list[tuple[object, str | None]], deterministic: bool | None
) -> None:
    start_device(tiny(deterministic=deterministic), "cuda:0")
    assert started == [(torch.device("cuda:0"), None)]


def test_a_borrowed_process_gets_its_gpu_and_environment_back(started: list[tuple[object, str | None]]) -> None:
    with borrowed_process(tiny(deterministic=True), World(device="cuda:0")):
        assert os.environ[CUBLAS] == ":4096:8"
    assert started == [("current", ":4096:8"), (torch.device("cuda:0"), ":4096:8"), (3, ":4096:8")]
    assert CUBLAS not in os.environ


@pytest.mark.parametrize("chosen", ["highest", "high", "medium"])
def test_products_of_fp32_values_round_as_the_run_says_and_afterwards_as_before(chosen: str) -> None:
    run = load_config("preset:tiny", sets={"train.matmul_precision": chosen})
    before = "medium" if chosen == "highest" else "highest"
    with rounded_products(before):
        with borrowed_process(run, World(device="cpu")):
            assert torch.get_float32_matmul_precision() == chosen
        assert torch.get_float32_matmul_precision() == before
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_program_that_uses_torchs_newer_settings_keeps_them() -> None:
    newer: Any = torch.backends  # without annotations
    newer.fp32_precision = "tf32"
    try:
        with borrowed_process(load_config("preset:tiny"), World(device="cpu")):
            assert newer.fp32_precision == "tf32"
        assert newer.fp32_precision == "tf32"
    finally:
        newer.fp32_precision = "none"


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_what_compares_bits_gets_deterministic_kernels_and_gives_them_back(
    device: str, started: list[tuple[object, str | None]]
) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        with deterministic_kernels(device):
            assert torch.are_deterministic_algorithms_enabled()
            assert os.environ.get(CUBLAS) == (None if device == "cpu" else ":4096:8")
        assert not torch.are_deterministic_algorithms_enabled()
        assert CUBLAS not in os.environ
    finally:
        torch.use_deterministic_algorithms(before)


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
        ({}, 4, (None, SPIN_BRIEFLY)),
        ({}, 5, ("passive", None)),
        ({"OMP_WAIT_POLICY": "active"}, 4, ("active", None)),
        ({"OMP_WAIT_POLICY": "active"}, 5, ("active", None)),
        ({"GOMP_SPINCOUNT": "7"}, 4, (None, "7")),
        ({"GOMP_SPINCOUNT": SPIN_BRIEFLY}, 5, ("passive", None)),  # the launcher's own
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
        ({}, KEEP_FREED),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, f"glibc.pthread.rseq=0:{KEEP_FREED}"),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, "glibc.malloc.check=1"),
        ({"MALLOC_ARENA_MAX": "1"}, None),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, None),
    ],
)
def test_freed_memory_is_kept_unless_the_allocator_was_told_otherwise(
    told: dict[str, str], kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_run_engine.training.rank_environment._has_glibc", lambda: True)
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


def test_over_gloo_ranks_that_ask_for_gpus_take_turns() -> None:
    assert choose_device("cuda", place("local"), 1, shared=True) == "cuda:0"
    assert choose_device("cuda", replace(place("local"), local_rank=3, rank=3), 2, shared=True) == "cuda:1"
    assert choose_device("cuda", place("local"), 4, shared=True) == "cuda:1"
    assert choose_device("auto", place("local"), 1, shared=True) == "cpu"
    with pytest.raises(InputError, match=r"needs 4 GPUs on here: 0 found; set run\.device=cpu$"):
        choose_device("cuda", place("local"), 0, shared=True)


def test_nccl_is_for_gpus_and_gloo_for_all() -> None:
    assert [choose_backend("auto", device) for device in ("cpu", "cuda:0")] == ["gloo", "nccl"]
    assert [choose_backend("gloo", device) for device in ("cpu", "cuda:0")] == ["gloo", "gloo"]
    assert choose_backend("nccl", "cuda:0") == "nccl"
    with pytest.raises(InputError, match=r"run\.backend=nccl needs GPUs: this run is on cpu; set run\.device=cuda"):
        choose_backend("nccl", "cpu")


def test_training_on_the_cpu_for_want_of_gpus_is_said() -> None:
    assert explain_device("auto", place("local"), 1) == "training on the CPU: 4 local ranks, 1 GPU"
    assert explain_device("auto", place("slurm"), 0) == "training on the CPU: no GPU on here"
    assert explain_device("auto", place("local"), 0) == explain_device("cpu", place("slurm"), 0) == ""
    assert explain_device("auto", place("slurm"), 1) == ""


def test_deterministic_kernels_on_a_gpu_need_cublas_told() -> None:
    assert deterministic_environment(True, "cuda:0") == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert deterministic_environment(None, "cuda:0") == deterministic_environment(True, "cpu") == {}


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
@pytest.mark.parametrize(
    ("setting", "devices", "forks"),
    [("auto", ("cpu",), True), ("spawn", ("cpu",), False), ("auto", ("cuda:0", "cuda:1"), False)],
)
def test_ranks_are_forked_on_cpus_unless_told_otherwise(
    setting: Literal["auto", "spawn"], devices: tuple[str, ...], forks: bool
) -> None:
    assert forks_ranks(setting, devices) == forks
