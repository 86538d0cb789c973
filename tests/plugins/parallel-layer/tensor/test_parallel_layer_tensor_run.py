"""Split layers under the command: other layers stacked on them, and their check."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import COMMAND, run_command
from tests.support.forked import forked_command

SETS = ("train.steps=4", "train.lr=1e-2", "model.dropout=0.0", "eval.interval=0", "model.num_heads=4")

pytestmark = pytest.mark.multiproc

#: A plugin in one file: attention written out, on top of whatever else the layers are.
MY_ATTENTION = """
import math

import torch
from torch import nn

from megatron_run import PluginInfo, hookimpl
from megatron_run.contracts import StackedLayers


class Plain(nn.Module):
    def forward(self, query, key, value, mask=None):
        scores = torch.einsum("qbnd,kbnd->bnqk", query, key) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
        return SCALE * torch.einsum("bnqk,kbnd->qbnd", scores.softmax(-1), value).flatten(2)


class MyAttention(StackedLayers):
    def core_attention(self, shape, dropout):
        super().core_attention(shape, dropout)  # which refuses heads that do not split
        return Plain()


@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("parallel-layer", "my_attention")


@hookimpl
def megatron_run_create_parallel_layer(base):
    return MyAttention(base)
"""


def losses(folder: Path, layers: str) -> list[float]:
    """Of a run of the command on two ranks."""
    words = [f"--set={each}" for each in (*SETS, "parallel.tensor=2", f"run.folder={folder / 'run'}", "run.threads=1")]
    words += ["--plugin", f"parallel-layer={layers}"]
    done = forked_command(("preset:tiny", *words), folder)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in next((folder / "run").rglob("metrics.jsonl")).read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_file_replaces_the_attention_core_and_keeps_the_split_layers(tmp_path: Path) -> None:
    found = {}
    for name, layers, scale in (
        ("tensor", "tensor", ""),
        ("mine", "tensor+./my_attention.py", "1.0"),
        ("half", "tensor+./my_attention.py", "0.5"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "my_attention.py").write_text(MY_ATTENTION.replace("SCALE", scale or "1.0"))
        found[name] = losses(folder, layers)
    assert len(found["tensor"]) == 4
    np.testing.assert_allclose(found["mine"], found["tensor"], rtol=0, atol=1e-5)
    assert not np.allclose(found["half"], found["tensor"], rtol=0, atol=1e-5), "the file's core did not run"


def test_plugins_check_starts_the_ranks_that_it_needs(tmp_path: Path) -> None:
    done = run_command((*COMMAND, "plugins", "check", "parallel-layer=tensor"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "row linear" in done.stdout


#: Split layers whose norms do not say that each rank sees a part of the tokens.
FORGETFUL = """
from dataclasses import replace

import megatron_run_parallel_layer_tensor as tensor

from megatron_run import PluginInfo, hookimpl
from megatron_run.contracts import StackedLayers


class Forgetful(StackedLayers):
    def norm(self, kind, size, eps=1e-5):
        norm = self.base.norm(kind, size, eps)
        norm.parameter_specs = {name: replace(spec, partial_over=None) for name, spec in norm.parameter_specs.items()}
        return norm


@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("parallel-layer", "forgetful", provides=frozenset({"parallel.tensor", "parallel.sequence"}))


@hookimpl
def megatron_run_create_parallel_layer(context):
    return Forgetful(tensor.megatron_run_create_parallel_layer(context=context, options=tensor.Options()))
"""


def test_plugins_check_names_layer_rank_and_tensor_of_a_wrong_file(tmp_path: Path) -> None:
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    done = run_command((*COMMAND, "plugins", "check", "./forgetful.py"), tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "layer norm: gradient of layer.bias on rank 0 of 2, sequence split: " in " ".join(done.stdout.split())
