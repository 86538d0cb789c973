"""Transformer Engine missing, empty, old or without a GPU: each has its message, exit code and alternative."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_run_cli.main import main
from tests.support.commands import COMMAND, run_command
from tests.support.engine_site import engine_site

CHOSEN = "preset:tiny --plugin parallel-layer=te"
INSTEAD = "choose --plugin parallel-layer=tensor"
EMPTY = "the transformer-engine that is installed is its empty meta package"
INSTALL = "type: pip install --no-build-isolation "

#: How the library is installed -> what a dry run says on a machine with a GPU: its beginning and its end.
MESSAGES = {
    "missing": (
        "parallel-layer=te needs Transformer Engine, which is not installed",
        f"{INSTALL}'megatron-run-parallel-layer-te[engine]', or {INSTEAD}",
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
        f"see the whole cause with --debug, or {INSTEAD}",
    ),
}


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("state", MESSAGES)
def test_a_library_that_cannot_be_used_is_named_with_what_to_type(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_gpu(monkeypatch)
    with engine_site(tmp_path, state).importable():
        code = main([*CHOSEN.split(), "--dry-run"])
    what, fix = MESSAGES[state]
    captured = capsys.readouterr()
    assert code == 3
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"megatron-run: {what}")
    assert captured.err.rstrip().endswith(fix)


@pytest.mark.parametrize("state", ["missing", "whole"])
def test_without_a_gpu_the_library_is_not_asked_for(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with engine_site(tmp_path, state).importable():
        assert main([*CHOSEN.split(), "--dry-run"]) == 3
    assert capsys.readouterr().err == (
        f"megatron-run: parallel-layer=te needs an NVIDIA GPU: there is none on this machine; {INSTEAD}\n"
    )


@pytest.mark.parametrize("state", ["whole", "on a path without metadata"])
def test_with_the_library_a_run_is_planned_as_with_dense_layers(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_gpu(monkeypatch)
    counts = []
    with engine_site(tmp_path, state).importable():
        for layers in ("te", "dense"):
            assert main(["preset:tiny", "--plugin", f"parallel-layer={layers}", "--dry-run"]) == 0
            counts += [line for line in capsys.readouterr().out.splitlines() if "parameters" in line]
    assert counts
    assert counts[: len(counts) // 2] == counts[len(counts) // 2 :]


@pytest.mark.multiproc
def test_two_ranks_without_a_gpu_stop_before_they_build_anything(tmp_path: Path) -> None:
    sets = ("--set", "parallel.tensor=2", "--set", f"run.folder={tmp_path / 'run'}", "--set", "run.device=cpu")
    done = run_command((*COMMAND, *CHOSEN.split(), *sets), tmp_path)
    assert done.returncode == 3
    lines = [line for line in done.stderr.splitlines() if line.startswith("megatron-run: ")]
    assert len(lines) == 1
    assert "parallel-layer=te needs an NVIDIA GPU" in lines[0]
    assert "(from --plugin parallel-layer=te)" in lines[0]
    assert INSTEAD in lines[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("plugins list", "megatron-run-parallel-layer-te"),
        ("plugins info parallel-layer=te", "delay_weight_gradients"),
        ("config explain parallel-layer.fp8 --plugin parallel-layer=te", "how matrix products are scaled to FP8"),
    ],
)
def test_it_is_listed_and_explained_without_the_library(
    words: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 0
    assert shown in capsys.readouterr().out


def test_importing_the_plugin_does_not_import_the_library() -> None:
    code = "import sys, megatron_run_parallel_layer_te; assert 'transformer_engine' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
