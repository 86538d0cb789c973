"""What a rank sets in its process, on a GPU that is only imagined."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_run.planning import ResolvedRun, load_config
from megatron_run_engine.launch.process import borrowed_process, start_device
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
