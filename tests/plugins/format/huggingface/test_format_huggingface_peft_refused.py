"""Adapters of PEFT that cannot come in or go out: one line says why, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_run import load
from megatron_run.errors import RunError
from megatron_run_cli.main import main
from megatron_run_engine.formats import convert
from tests.support.small_models import LLAMA, saved_network

Output = pytest.CaptureFixture[str]
FILE = "adapter_model.safetensors"
QUERY = "base_model.model.model.layers.1.self_attn.q_proj"
HIDDEN, RANK = 24, 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with all weights of a small model."""
    folder = tmp_path_factory.mktemp("base") / "run"
    saved_network(folder, LLAMA)
    return folder


def adapters(folder: Path, said: dict[str, Any], tensors: dict[str, Tensor | None]) -> Path:
    """A folder of adapters of a query matrix, but for what is ``said`` otherwise; None takes a tensor away."""
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "somebody/llama", "r": RANK, "lora_alpha": 4, **said}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    usual = {
        f"{QUERY}.lora_A.weight": torch.ones(RANK, HIDDEN),
        f"{QUERY}.lora_B.weight": torch.ones(HIDDEN, RANK),
        **tensors,
    }
    save_file({name: tensor for name, tensor in usual.items() if tensor is not None}, folder / FILE)
    return folder


def refusal(source: Path, base: Path | None) -> str:
    target = source.parent / "new"
    with pytest.raises(RunError) as error:
        convert.import_model(source, target, base=base)
    assert not target.exists()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_usual_is_read(dtype: torch.dtype, run: Path, tmp_path: Path) -> None:
    values = {f"{QUERY}.lora_A.weight": torch.ones(RANK, HIDDEN, dtype=dtype)}
    source = adapters(tmp_path / "peft", {"somebody_adds_later": None, "target_modules": "all-linear"}, {**values})
    convert.import_model(source, tmp_path / "new", base=run)
    text = [[1, 2, 3]]
    assert not torch.equal(load(tmp_path / "new")(text), load(run)(text))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' (only 'LORA')"),
        ({"use_dora": True}, "use_dora=True (only unset)"),
        ({"bias": "lora_only"}, "bias='lora_only' (only 'none' or None)"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] (only unset)"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' (only True or"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters=['experts.gate_up_proj'] (only unset)"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices=[1] (only unset)"),
        ({"layer_replication": [[0, 2]]}, "layer_replication=[[0, 2]] (only unset)"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens=[3] (only unset)"),
        ({"lora_bias": True}, "lora_bias=True (only unset)"),
        ({"somebody_adds_later": {"x": 1}}, "somebody_adds_later={'x': 1} (only unset)"),
        ({"rank_pattern": {".*(a+)+": 4}}, "rank_pattern={'.*(a+)+': 4} (only names"),
        ({"use_rslora": 1}, "use_rslora=1 (only true or false)"),
        ({"use_rslora": "true"}, "use_rslora='true' (only true or false)"),
        ({"base_model_name_or_path": ["a"]}, "base_model_name_or_path=['a'] (only a text)"),
        ({"r": 0}, "a rank is 0"),
        ({"r": True}, "a rank is True"),
        ({"lora_alpha": float("inf")}, "an alpha is inf"),
        ({"lora_alpha": 10**400}, "an alpha is 1000"),
        ({"lora_dropout": 1}, "lora_dropout is 1"),
        ({"r": 3}, "lora_A of model.layers.1.self_attn.q_proj is [2, 24], and [3, 24] here"),
        ({"rank_pattern": {"q_proj": 4}}, "is [2, 24], and [4, 24] here"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_key_that_decides_is_named(said: dict[str, Any], why: str, run: Path, tmp_path: Path) -> None:
    assert why in refusal(adapters(tmp_path / "peft", said, {}), run)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({f"{QUERY}.lora_magnitude_vector": torch.ones(HIDDEN)}, "is none of a low-rank adapter of a matrix"),
        ({"base_model.model.lm_head.base_layer.weight": torch.ones(61, HIDDEN)}, "save_embedding_layers=False"),
        ({f"{QUERY}.lora_B.weight": None}, "model.layers.1.self_attn.q_proj lacks lora_B"),
        ({f"{QUERY}.lora_B.weight": torch.ones(RANK, HIDDEN)}, "lora_B of model.layers.1.self_attn.q_proj is [2, 24]"),
        ({f"{QUERY}.lora_A.weight": torch.ones(RANK, HIDDEN).to(torch.int8)}, "has values of type I8"),
        ({QUERY.replace("q_proj", "rotary") + ".lora_A.weight": torch.ones(1)}, "rotary is no matrix of the model"),
        ({QUERY.replace("1.", "9.") + ".lora_A.weight": torch.ones(1)}, "layers.9.self_attn.q_proj is no matrix of"),
        (
            {QUERY.replace("self_attn.q_proj", "input_layernorm") + ".lora_A.weight": torch.ones(1)},
            "input_layernorm is no matrix of the model",
        ),
        ({f"{QUERY}.lora_A.weight": None, f"{QUERY}.lora_B.weight": None}, "there are none"),
    ],
)
def test_a_tensor_that_is_not_of_the_model_is_named(
    tensors: dict[str, Tensor | None], why: str, run: Path, tmp_path: Path
) -> None:
    assert why in refusal(adapters(tmp_path / "peft", {}, tensors), run)


def test_files_that_are_missing_cut_or_pickles_are_refused(run: Path, tmp_path: Path) -> None:
    source = adapters(tmp_path / "peft", {}, {})
    content = (source / FILE).read_bytes()
    (source / FILE).write_bytes(content[:-9])
    assert FILE in refusal(source, run)
    (source / FILE).unlink()
    assert f"has no {FILE}; save the adapters as safetensors" in refusal(source, run)
    (source / "adapter_model.bin").touch()
    assert "adapter_model.bin is a pickle, which could execute anything" in refusal(source, run)
    (source / FILE).symlink_to("/dev/zero")
    assert FILE in refusal(source, run)
    (source / "adapter_config.json").write_text("[]")
    assert "adapter_config.json cannot be used: it is not a JSON object" in refusal(source, run)


def test_the_model_that_is_adapted_must_be_here(run: Path, tmp_path: Path) -> None:
    source = adapters(tmp_path / "peft", {}, {})
    new = f"megatron-run import {source} NEW --base BASE"
    assert refusal(source, None) == (
        f"{source} holds adapters of somebody/llama: which is no folder here; import that model as BASE, then: {new}; "
        "if somebody/llama is a model of the Hugging Face Hub, type hf:somebody/llama"
    )
    convert.export_model(run, tmp_path / "hf", "huggingface")
    assert refusal(source, tmp_path / "hf") == (
        f"no weights are saved in {tmp_path / 'hf'}, the model that {source} adapts; "
        f"import it: megatron-run import {tmp_path / 'hf'} BASE, then: {new}"
    )
    assert "there is no such folder" in refusal(source, tmp_path / "nowhere")
    assert "holds a whole model: only adapters have a base" in refusal(tmp_path / "hf", run)
    saved_network(tmp_path / "other", {**LLAMA, "hidden_size": 36})
    assert "lora_A of model.layers.1.self_attn.q_proj is [2, 24], and [2, 36] here" in refusal(
        source, tmp_path / "other"
    )
    named = adapters(tmp_path / "named", {"base_model_name_or_path": str(run)}, {})
    convert.import_model(named, tmp_path / "imported")


def test_a_run_of_all_weights_has_no_adapters(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds all weights, and no adapters: .*write the model: --to huggingface"):
        convert.export_model(run, tmp_path / "peft", "peft")


@pytest.mark.parametrize(
    "words", [("generate", "{}", "hello"), ("eval", "{}", "--task", "perplexity={}"), ("generate", "{}", "--chat")]
)
def test_commands_that_want_a_model_say_what_to_type(words: tuple[str, ...], tmp_path: Path, capsys: Output) -> None:
    source = adapters(tmp_path / "peft", {}, {})
    assert main([word.format(source) for word in words]) == 2
    assert capsys.readouterr().err.endswith(
        f"{source} holds adapters, and not the model that they adapt; "
        f"import them: megatron-run import {source} NEW --base MODEL, then name NEW\n"
    )


def test_finetuning_adapters_says_which_model_is_wanted(tmp_path: Path, capsys: Output) -> None:
    source = adapters(tmp_path / "peft", {}, {})
    assert main(["finetune", str(source), "--data", __file__]) == 2
    text = capsys.readouterr().err
    assert f"{source} holds adapters of somebody/llama: which is no folder here; import that model as BASE" in text


def test_what_to_type_is_quoted_and_a_home_is_found(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "my home"
    source = adapters(tmp_path / "my peft", {"base_model_name_or_path": "m" * 5000}, {})
    assert refusal(source, None).endswith(f"then: megatron-run import '{source}' NEW --base BASE")
    monkeypatch.setenv("HOME", str(home))
    convert.export_model(run, home / "hf", "huggingface")
    assert refusal(source, Path("~/hf")) == (
        f"no weights are saved in {home / 'hf'}, the model that {source} adapts; import it: "
        f"megatron-run import '{home / 'hf'}' BASE, then: megatron-run import '{source}' NEW --base BASE"
    )
