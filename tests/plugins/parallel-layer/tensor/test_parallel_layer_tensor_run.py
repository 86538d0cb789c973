"""Split layers in a run, with other layers stacked on them, and the command that checks them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_run.config.request import Request
from megatron_run_cli.main import main
from tests.support.ranks import start_server
from tests.support.training import train_many

SETS = (
    "train.steps=3",
    "train.lr=1e-2",
    "train.sequence_length=16",
    "model.dropout=0.0",
    "model.num_heads=4",
    "model.num_layers=2",
    "eval.interval=0",
    "parallel.tensor=2",
)

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


def test_a_file_replaces_the_attention_core_and_keeps_the_split_layers(tmp_path: Path) -> None:
    layers = ["tensor"]
    for name, scale in (("mine", "1.0"), ("half", "0.5")):
        (tmp_path / f"{name}.py").write_text(MY_ATTENTION.replace("SCALE", scale))
        layers.append(f"tensor+{tmp_path / name}.py")
    requests = [Request(("preset:tiny",), SETS, (f"parallel-layer={each}",), nproc=2) for each in layers]
    tensor, mine, half = (ranks[0].losses for ranks in train_many(2, requests))
    assert len(tensor) == 3
    np.testing.assert_allclose(mine, tensor, rtol=0, atol=1e-5)
    assert not np.allclose(half, tensor, rtol=0, atol=1e-5), "the file's core did not run"


def checked(
    target: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """The exit code of ``megatron-run plugins check``, and what it says. Its ranks are forked, as those of tests."""
    start_server()
    monkeypatch.chdir(folder)
    return main(["plugins", "check", target]), " ".join(capsys.readouterr().out.split())


@pytest.mark.nightly  # as that of a wrong file does
def test_plugins_check_starts_the_ranks_that_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = checked("parallel-layer=tensor", tmp_path, capsys, monkeypatch)
    assert code == 0, said
    assert "row linear" in said


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


def test_plugins_check_names_layer_rank_and_tensor_of_a_wrong_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    code, said = checked("./forgetful.py", tmp_path, capsys, monkeypatch)
    assert code == 3, said
    assert "layer norm: gradient of layer.bias on rank 0 of 2, sequence split: " in said
