"""Transformer Engine missing, empty, old or without a GPU: each has its message, exit code and alternative."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_run import load_config
from megatron_run.errors import InputError
from megatron_run_cli.main import main
from megatron_run_cli.reports import dry_run, probe
from megatron_run_engine import train
from megatron_run_engine.launch import local
from megatron_run_parallel_layer_te import shapes
from tests.plugins.engine import stand_in as engine_stand_in
from tests.plugins.engine.site import engine_site
from tests.plugins.optional_library import answer_here, check_import

CHOSEN = "preset:tiny --plugin parallel-layer=te"
INSTEAD = "choose --plugin parallel-layer=tensor"
EMPTY = "the transformer-engine that is installed is its empty meta package"
INSTALL = "type: pip install --no-build-isolation "

#: How the library is installed -> what a run says on a machine with a GPU: its beginning and its end.
MESSAGES = {
    "missing": (
        "parallel-layer=te needs Transformer Engine, which is not installed",
        f"{INSTALL}'transformer-engine[pytorch]<2.21,>=2.9', or {INSTEAD}",
    ),
    "empty": (
        f"{EMPTY}: its extension for PyTorch, transformer-engine-torch, is not installed",
        f"{INSTALL}'transformer-engine[pytorch]==2.20.2', or {INSTEAD}",
    ),
    "without the extension": (
        EMPTY,
        f"{INSTALL}'transformer-engine[pytorch]==2.13.0', or {INSTEAD}",
    ),
    "old": (
        "Transformer Engine 1.13.0 is too old for parallel-layer=te: 2.9 or newer is needed",
        f"type: pip install --upgrade --no-build-isolation 'transformer-engine[pytorch]>=2.9', or {INSTEAD}",
    ),
    "broken": (
        "Transformer Engine 2.20.2 cannot be imported: ImportError: libcudnn.so.9: cannot open shared object file",
        f"see the libraries of CUDA in megatron-run doctor, the whole cause with --debug, or {INSTEAD}",
    ),
}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, in which no rank may be started."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(local, "run_local", lambda plan: pytest.fail("ranks were started"))
    return folder


def on_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def refused(words: str, code: int, work: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said, in one line, of a run that ends with ``code`` and has written nothing."""
    assert main(words.split()) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert list(work.iterdir()) == []
    return captured.err.rstrip()


@pytest.mark.parametrize("state", MESSAGES)
def test_a_library_that_cannot_be_used_is_named_with_what_to_type(
    state: str, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpus(monkeypatch, 1)
    with engine_site(tmp_path / "site", state).importable():
        said = refused(CHOSEN, 3, work, capsys)
    what, fix = MESSAGES[state]
    assert said.startswith(f"megatron-run: {what}")
    assert said.endswith(fix)


@pytest.mark.parametrize("words", ["", " --set parallel.tensor=2"])
@pytest.mark.parametrize("state", ["missing", "whole"])
def test_without_a_gpu_the_library_is_not_asked_for(
    state: str,
    words: str,
    work: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_gpus(monkeypatch, 0)
    with engine_site(tmp_path / "site", state).importable():
        assert refused(CHOSEN + words, 3, work, capsys) == (
            "megatron-run: parallel-layer=te needs an NVIDIA GPU: there is none on this machine "
            f"(from --plugin parallel-layer=te); {INSTEAD}"
        )


#: Words after ``parallel-layer=te`` on a GPU with the library -> exit code and the beginning of what is said.
REFUSALS = {
    ",fp8=current --set model.hidden_size=40": (
        2,
        "120 output features of a rank do not fit parallel-layer.fp8=current: ",
    ),
    ",fp8=current --set train.sequence_length=20": (
        2,
        "train.micro_batch_size=2 x train.sequence_length=20 = 40 tokens",
    ),
    ",fp8=delayed --set train.recompute=full": (2, "parallel-layer.fp8=delayed does not go with train.recompute=full"),
    ",fp8=mxfp8": (
        3,
        "this GPU cannot compute with parallel-layer.fp8=mxfp8: Device compute capability 10.0 or higher",
    ),
    " --set run.device=cpu": (3, "parallel-layer=te needs an NVIDIA GPU: this run is on the CPU"),
    " --set run.device=cuda --set parallel.tensor=2": (2, "run.device=cuda needs 2 GPUs on "),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_what_a_gpu_or_its_products_cannot_do_is_said_before_anything_is_written(
    words: str, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpus(monkeypatch, 1)
    code, beginning = REFUSALS[words]
    with engine_site(tmp_path / "site", "whole").importable():
        assert refused(CHOSEN + words, code, work, capsys).startswith(f"megatron-run: {beginning}")


def test_python_is_told_before_anything_is_written(work: Path) -> None:
    run = load_config("preset:tiny", plugins=["parallel-layer=te,fp8=current"], sets=["model.hidden_size=40"])
    with pytest.raises(InputError, match="120 output features of a rank do not fit"):
        train(run)
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("dense", ""),
        ("tensor", "--set parallel.tensor=2 --set model.norm.kind=rmsnorm"),
        ("tensor", "--set parallel.tensor=2 --set parallel.sequence=true --set model.bias=false"),
    ],
)
def test_a_run_is_planned_without_a_gpu_and_without_the_library(
    layers: str,
    words: str,
    work: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_gpus(monkeypatch, 0)
    counts = []
    with engine_site(tmp_path / "site", "broken").importable():
        for name in ("te", layers):
            assert main(["preset:tiny", "--plugin", f"parallel-layer={name}", *words.split(), "--dry-run"]) == 0
            lines = capsys.readouterr().out.splitlines()
            counts.append([line.partition(";")[0] for line in lines if "a parameter (" in line])
            # Of the other layers activations would be counted, for seconds: te's cannot run a forward here.
            monkeypatch.setattr(dry_run, "_step_memory", lambda *_: None)
    assert counts[0]
    assert counts[0] == counts[1]
    assert list(work.iterdir()) == []


def test_a_plan_says_why_it_cannot_be_trained_on_this_machine(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpus(monkeypatch, 0)
    words = ["preset:tiny", "--dry-run", "--plugin"]
    assert main([*words, "parallel-layer=te"]) == 0
    note = "this machine cannot train it: parallel-layer=te needs an NVIDIA GPU: there is none on this machine"
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"note: {note} (from ")
    assert main([*words, "parallel-layer=te", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notices"][-1].startswith(note)
    monkeypatch.setattr(dry_run, "_step_memory", lambda *_: None)
    assert main([*words, "parallel-layer=dense"]) == 0
    assert "cannot train" not in capsys.readouterr().out


SHARED: Mapping[str, Any] = {"tp_size": 2, "params_dtype": torch.bfloat16, "device": "meta"}
ALONE: Mapping[str, Any] = {"eps": 1e-3, "dtype": torch.bfloat16, "device": "meta"}
#: Module, its sizes, its arguments.
MADE: tuple[tuple[str, tuple[int, ...], Mapping[str, Any]], ...] = (
    ("Linear", (8, 6), {**SHARED, "parallel_mode": "column", "bias": True}),
    ("Linear", (8, 6), {**SHARED, "parallel_mode": "row", "bias": False}),
    ("LayerNormLinear", (8, 6), {**SHARED, "parallel_mode": "column", "bias": True, "normalization": "LayerNorm"}),
    ("LayerNormLinear", (8, 6), {**SHARED, "parallel_mode": "column", "bias": False, "normalization": "RMSNorm"}),
    ("LayerNorm", (8,), ALONE),
    ("RMSNorm", (8,), ALONE),
)


@pytest.mark.parametrize(("module", "sizes", "arguments"), MADE)
def test_a_plan_holds_the_parameters_of_the_modules(
    module: str, sizes: tuple[int, ...], arguments: Mapping[str, Any]
) -> None:
    planned, real = (
        {
            name: (p.shape, p.dtype, p.device)
            for name, p in getattr(library, module)(*sizes, **arguments).named_parameters()
        }
        for library in (shapes, engine_stand_in)
    )
    assert planned == real
    assert planned


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("plugins list", "megatron-run-parallel-layer-te"),
        ("plugins info parallel-layer=te", "delay_weight_gradients"),
        ("config explain parallel-layer.fp8 --plugin parallel-layer=te", "FP8 scaling of matrix products"),
    ],
)
def test_it_is_listed_and_explained_without_the_library(
    words: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "_ask_child", answer_here)
    assert main(words.split()) == 0
    assert shown in capsys.readouterr().out


def test_importing_the_plugin_does_not_import_the_library(tmp_path: Path) -> None:
    check_import("megatron_run_parallel_layer_te", "transformer_engine", tmp_path)
