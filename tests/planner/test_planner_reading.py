"""The costs that a model tells beside the model itself, built on the meta device: weights and saved values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_run.config.request import Request
from megatron_run.config.values import nested
from megatron_run.contracts.topology import Topology
from megatron_run.planning import load_config, resolve
from megatron_run_cli.main import main
from megatron_run_engine.estimate.step_memory import count_chunks
from megatron_run_engine.nn.attention import CoreAttention
from megatron_run_engine.runtime.comm import Groups
from megatron_run_engine.runtime.parameter_init import count_parameters, describe_parameters
from megatron_run_engine.training.build import build_chunks, make_context, make_layers, with_vocabulary
from megatron_run_planner.memory import layer_activations
from megatron_run_planner.task import read_task
from tests.support.checkout import KERNEL, ROOT

#: One rank, and the vocabulary that the data of many presets would tell.
ALONE = (
    *(f"parallel.{key}=1" for key in ("tensor", "pipeline", "chunks", "expert", "data")),
    "parallel.layers=",
    "parallel.sequence=false",
    "model.vocab_size=50304",
)
#: Presets with a model of their own.
PRESETS = sorted(
    file.stem for file in KERNEL.folder.rglob("presets/*.yaml") if "\nmodel:" in file.read_text(encoding="utf-8")
)
_GPT = {"num_layers": 6, "hidden_size": 256, "num_heads": 8, "vocab_size": 1000}
_MIXED = {**_GPT, "experts.count": 4, "ffn_size": 704, "experts.ffn_size": 96, "activation": "swiglu", "bias": False}
_LATENT = {"use": "deepseek", "kv_rank": 64, "rope_head_size": 16, "nope_head_size": 32, "value_head_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {**_GPT, "num_kv_heads": 2, "head_size": 48, "activation": "geglu", "tie_embeddings": False},
    "rotary, windows": {**_GPT, "position": "rope", "attention.window": 16, "attention.window_pattern": [1, 0]},
    "every second layer has experts": {
        **_MIXED,
        "experts.layer_freq": 2,
        "experts.top_k": 1,
        "experts.router.pre_softmax": True,
    },
    "a pattern after a dense layer": {**_MIXED, "experts.layer_first": 1, "experts.layer_pattern": [1, 1, 0]},
    "a shared expert with a gate": {**_MIXED, "experts.shared.ffn_size": 160, "experts.shared.gate": True},
    "latents": {**_GPT, **_LATENT},
    "latents of queries, experts, two more tokens": {
        **_MIXED,
        **_LATENT,
        "query_rank": 48,
        "mtp_layers": 2,
        "experts.layer_first": 2,
        "experts.shared.ffn_size": 96,
    },
    "one more token behind a dense layer": {**_MIXED, **_LATENT, "mtp_layers": 1, "experts.layer_pattern": [1, 0]},
    "bert": {**_GPT, "use": "bert", "head": "masked"},
    "t5": {"num_layers": 6, "hidden_size": 256, "num_heads": 4, "vocab_size": 1000, "use": "t5", "encoder_length": 48},
    "t5 of relu, a short encoder": {
        "num_layers": 7,
        "hidden_size": 256,
        "num_heads": 8,
        "head_size": 48,
        "vocab_size": 1000,
        "use": "t5",
        "encoder_layers": 2,
        "encoder_length": 24,
        "activation": "relu",
        "tie_embeddings": False,
    },
    "bert, classes": {**_GPT, "use": "bert", "head": "classification"},
}


def counted(request: dict[str, Any] | str) -> float:
    """Parameters of the model with biases and norms: what one rank would build."""
    plugins = ("schedule=sequential", "data=mock", "optimizer=adamw", "parallel-layer=dense", "graph-capture=none")
    run = load_config(request, sets=ALONE, plugins=plugins, nproc=1)
    data = run.make_data()
    options = with_vocabulary(run, data)
    context = make_context(run, Topology(run.sizes, 0), Groups(), torch.device("meta"), options, data.fields)
    _, _, chunks = build_chunks(run, context, make_layers(run, context))
    return count_parameters(info for chunk in chunks for info in describe_parameters(chunk).values())


def kept(model: dict[str, Any], parallel: dict[str, Any], layers: int) -> int:
    """Bytes that one microbatch's forward leaves, counted in the layers themselves."""
    config = {**small({**model, "num_layers": layers}, 1024), "parallel": parallel}
    plugins = ("parallel-layer=tensor",) if parallel else ()
    (chunk,) = count_chunks(resolve(Request((config,), plugins=plugins)), 0, {})
    return chunk.kept


KEPT: dict[str, dict[str, Any]] = {
    "gelu": {},
    "grouped, rotary": {"num_kv_heads": 2, "position": "rope"},
    "swiglu": {"activation": "swiglu", "bias": False},
    "geglu": {"activation": "geglu", "ffn_size": 2816},
}


#: How a layer may be split.
PARALLEL: dict[str, dict[str, Any]] = {"alone": {}, "sequence parallel": {"tensor": 2, "sequence": True}}


@pytest.mark.parametrize(
    ("name", "parallel"),
    [  # by day every other layer is split
        pytest.param(name, PARALLEL[way], id=f"{name}-{way}", marks=[pytest.mark.nightly] * (index % 2 != place))
        for index, name in enumerate(KEPT)
        for place, way in enumerate(PARALLEL)
    ],
)
def test_a_layer_keeps_what_the_planner_counts(name: str, parallel: dict[str, Any]) -> None:
    """Without dropout and RMSNorm, of which a CPU keeps other pieces; all but statistics of norms and softmax."""
    model = {**_GPT, "hidden_size": 1024, "num_heads": 16, **KEPT[name], "dropout": 0.0}
    config = {**small(model, 1024), "parallel": parallel}
    task = read_task(Request((config,)), None)
    counted = (kept(model, parallel, 3) - kept(model, parallel, 1)) / 2
    assert layer_activations(task.model.layers[0], task.split) == pytest.approx(counted, rel=0.005)


@pytest.mark.parametrize("name", KEPT)
def test_a_dropout_keeps_a_byte_a_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is the engine's own dropout, and a GPU's. Attention's is left out: a CPU keeps probabilities for it."""
    shaped = CoreAttention.shaped
    monkeypatch.setattr(CoreAttention, "shaped", lambda shape, dropout: shaped(shape, 0.0))
    parallel = {"tensor": 2}
    model = {**_GPT, "hidden_size": 1024, "num_heads": 16, **KEPT[name], "dropout": 0.1}
    task = read_task(Request(({**small(model, 1024), "parallel": parallel},)), None)
    counted = (kept(model, parallel, 3) - kept(model, parallel, 1)) / 2
    assert layer_activations(task.model.layers[0], task.split) == pytest.approx(counted, rel=0.005)
    masked = layer_activations(task.model.layers[0], task.split) - layer_activations(
        replace(task.model.layers[0], dropout=False), task.split
    )
    assert masked == 2 * 1024 * 1024


def small(model: dict[str, Any], sequence: int = 32) -> dict[str, Any]:
    train = {
        "precision": "bf16",
        "sequence_length": sequence,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "steps": 2,
    }
    return {"version": 1, "model": {"use": "gpt", **model}, "train": train, "data": {"use": "mock", "vocab_size": 1000}}


@pytest.mark.parametrize("name", [*MODELS, *(f"preset:{each}" for each in PRESETS)])
def test_a_model_tells_its_own_weights(name: str) -> None:
    """Biases and norms are the only omission: below 2% in models of 256 features, 0.2% in presets."""
    config = small(nested(MODELS[name])) if name in MODELS else name
    model = read_task(Request((config,), sets=ALONE), 1).model
    parameters = counted(config)
    assert model.weights <= parameters
    assert model.weights == pytest.approx(parameters, rel=0.02 if name in MODELS else 0.002)


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2, "sequence": True}], ids=["alone", "sequence parallel"])
def test_a_model_of_a_third_party_is_planned_by_what_it_tells(parallel: dict[str, Any], tmp_path: Path) -> None:
    """It has no attention, and its feed-forward halves no dropout: weights and saved values are counted in it."""
    text = (ROOT / "tests/examples/plugins/model.py").read_text(encoding="utf-8")
    file = tmp_path / "model.py"
    file.write_text(text.replace('"rmsnorm"', '"layernorm"'))  # of RMSNorm a CPU keeps other pieces
    model = {"use": str(file), "hidden_size": 1024, "vocab_size": 1000}
    config = small({**model, "num_layers": 3}, 1024)
    weights = read_task(Request((config,), sets=ALONE), 1).model.weights
    assert weights == pytest.approx(counted(config), rel=0.002)
    task = read_task(Request(({**config, "parallel": parallel},)), None)
    saved = (kept(model, parallel, 3) - kept(model, parallel, 1)) / 2
    assert layer_activations(task.model.layers[0], task.split) == pytest.approx(saved, rel=0.005)


def test_a_plan_knows_the_vocabulary_of_bytes_and_of_no_other_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "preset:tiny", "--plugin", "data=text", "--device", "a100", "--gpus", "1")
    assert main([*words]) == 0
    assert "50257" not in capsys.readouterr().out
    assert main([*words, "--set", "data.tokenizer=mine.json"]) == 0
    assert "read as 50257 words" in capsys.readouterr().out
