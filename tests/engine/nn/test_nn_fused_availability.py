"""The kernels run where Triton and a C compiler are installed; elsewhere layers keep their own code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_run.planning import load_config
from megatron_run_engine import train
from megatron_run_engine.nn.fused import availability, triton_lack, triton_runs

SETS = {"train.steps": 2, "train.micro_batch_size": 1, "train.global_batch_size": 1, "train.sequence_length": 16}


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    """A process keeps what it found of its machine."""
    availability.has_kernels.cache_clear()
    yield
    availability.has_kernels.cache_clear()


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only folder of programs, empty, on a machine with Triton."""
    monkeypatch.setattr(availability, "find_spec", lambda _: object())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_triton_runs_with_either_compiler(name: str, programs: Path) -> None:
    assert not triton_runs()
    (programs / name).touch(0o755)
    assert triton_runs()


def test_the_compiler_that_is_named_counts_alone(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (programs / "gcc").touch(0o755)
    monkeypatch.setenv("CC", "mycc")
    lack = triton_lack()
    assert lack is not None
    assert lack.why == "Triton needs a C compiler, and mycc, which CC names, is not found"
    (programs / "mycc").touch(0o755)
    assert triton_runs()


def _without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "find_spec", lambda _: None)


@pytest.mark.parametrize(
    ("lacking", "why"),
    [
        (
            True,
            "Triton is not installed: training takes more",
        ),
        (False, "Triton needs a C compiler, and neither gcc nor clang is found: training "),
    ],
    ids=["no Triton", "no compiler"],
)
def test_a_gpu_where_triton_lacks_something_trains_by_the_eager_code_and_says_so_once(
    lacking: bool,
    why: str,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The CPU passes for a GPU where layers ask for kernels: a kernel that were launched would fail."""
    monkeypatch.setattr(availability, "device_type", lambda _: "cuda")
    if lacking:
        _without_triton(monkeypatch)
    run = load_config("preset:tiny", sets={**SETS, "run.folder": str(tmp_path_factory.mktemp("run")), "run.threads": 1})
    assert train(run).steps == 2
    said = [record.message for record in caplog.records if record.name == availability.__name__]
    assert len(said) == 1
    assert said[0].startswith(why)
