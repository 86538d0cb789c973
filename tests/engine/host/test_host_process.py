"""The devices of a rank, and what is set in its process, on a GPU that is only imagined."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from megatron_run.errors import InputError
from megatron_run.planning import ResolvedRun, load_config
from megatron_run_engine.host.process import (
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
from megatron_run_engine.runtime.world import World

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
