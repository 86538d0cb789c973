"""Hugging Face folders: ``transformers`` computes the logits that we compute, whoever wrote the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from megatron_run import load
from megatron_run.errors import RunError
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.formats import convert
from megatron_run_engine.formats.convert import read_step
from megatron_run_engine.formats.gpt_tensors import gpt_options
from megatron_run_format_huggingface import model_folder
from megatron_run_testing.build_contexts import logical_values
from tests.plugins.format.huggingface.saving import save
from tests.support.small_models import (
    GPT2,
    LENGTH,
    LLAMA,
    fill,
    logits_of,
    network,
    options_of,
    save_model,
    saved_network,
)

OURS = {
    "gpt2": GPT2,
    "gpt2 untied, tanh": {**GPT2, "tie_embeddings": False, "activation": "gelu_tanh", "norm.eps": 2e-4},
    "llama": LLAMA,
    "llama with biases, tied": {**LLAMA, "bias": True, "tie_embeddings": True, "num_kv_heads": None},
}
SMALL_GPT2 = {"n_layer": 2, "n_embd": 24, "n_head": 3, "vocab_size": 61, "n_positions": LENGTH}
SMALL_LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": LENGTH,
}
THEIRS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": SMALL_GPT2,
    "gpt2 untied, gelu": {
        **SMALL_GPT2,
        "tie_word_embeddings": False,
        "activation_function": "gelu",
        "n_inner": 40,
    },
    "llama": SMALL_LLAMA,
    "llama with biases, tied": {
        **SMALL_LLAMA,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}


def tokens() -> Tensor:
    return torch.randint(61, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def their_model(folder: Path, **options: Any) -> Any:
    """What transformers loads from ``folder``. It is loaded where it is used: every worker reads this file."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


def their_logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(tokens()).logits
    return found


def our_logits(folder: Path) -> Tensor:
    """From an imported folder alone."""
    checkpoints = Checkpoints(folder / "checkpoints")
    weights = read_step(checkpoints, checkpoints.steps()[-1])
    options = gpt_options(weights)
    built = network(options)
    fill(built, {name: read() for name, read in weights.tensors.items()})
    return logits_of(built, tokens(), 61)


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.1, "logits near zero would not tell"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def theirs(folder: Path, case: str, **more: Any) -> Any:
    """A model of transformers with random weights that make every path matter, saved in ``folder``."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    options, gpt2 = THEIRS[case], case.startswith("gpt2")
    model: Any = GPT2LMHeadModel(GPT2Config(**options)) if gpt2 else LlamaForCausalLM(LlamaConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    save(model, folder, **more)
    return model


@pytest.mark.parametrize("case", OURS)
def test_transformers_loads_what_was_exported_and_computes_the_same(case: str, tmp_path: Path) -> None:
    built, options = saved_network(tmp_path / "run", OURS[case])
    convert.export_model(tmp_path / "run", tmp_path / "hf", "huggingface")
    model, said = their_model(tmp_path / "hf", output_loading_info=True)
    assert not any(said.values()), "nothing is missing, left over or of another shape"
    assert model.dtype == torch.float32
    assert_same_logits(their_logits(model), logits_of(built, tokens(), 61))
    assert model.config.max_position_embeddings == LENGTH
    with safe_open(tmp_path / "hf" / model_folder.SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}, "older versions of transformers ask for it"
    assert model.config.tie_word_embeddings is options.tie_embeddings


@pytest.mark.parametrize("shards", ["one file", "several"])
@pytest.mark.parametrize("case", THEIRS)
def test_what_transformers_saved_is_imported_and_computes_the_same(case: str, shards: str, tmp_path: Path) -> None:
    size = {"max_shard_size": "8KB"} if shards == "several" else {}
    model = theirs(tmp_path / "hf", case, **size)
    assert (tmp_path / "hf" / model_folder.INDEX).exists() == (shards == "several")
    done = convert.import_model(tmp_path / "hf", tmp_path / "ours")
    assert done.format == "huggingface"
    assert done.parameters == model.num_parameters()
    assert_same_logits(our_logits(tmp_path / "ours"), their_logits(model))
    convert.export_model(tmp_path / "ours", tmp_path / "again", "huggingface")
    found = load_file(tmp_path / "again" / model_folder.SINGLE)
    expected = {
        name: tensor for path in (tmp_path / "hf").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), "no bit is lost on the way"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}, (1, 3, None)),
        ({"pad_token": "absent"}, (None, None, 4)),  # transformers adds it
        ({}, (None, 2, None)),
        (None, (None, 2, None)),
    ],
)
def test_the_export_of_a_run_names_the_tokens_that_its_tokenizer_tells(
    said: dict[str, Any] | None, expected: tuple[int | None, ...], tmp_path: Path
) -> None:
    from transformers import GenerationConfig

    saved_network(tmp_path / "run", LLAMA)
    made = Tokenizer(WordLevel({"a": 0, "<s>": 1, "</s>": 2, "<|im_end|>": 3}, unk_token="a"))
    made.save(str(tmp_path / "run" / "tokenizer.json"))
    if said is not None:
        (tmp_path / "run" / "tokenizer_config.json").write_text(json.dumps(said))
    convert.export_model(tmp_path / "run", tmp_path / "hf", "huggingface")
    config, generation = their_model(tmp_path / "hf").config, GenerationConfig.from_pretrained(tmp_path / "hf")
    for found in (config, generation):
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == expected


def test_an_export_of_several_files_is_read_by_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, _ = saved_network(tmp_path / "run", LLAMA)
    monkeypatch.setattr("megatron_run_format_huggingface.model_folder.SHARD", 8000)
    convert.export_model(tmp_path / "run", tmp_path / "hf", "huggingface")
    index = json.loads((tmp_path / "hf" / model_folder.INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    found = {name: load_file(tmp_path / "hf" / name) for name in shards}
    assert {name: shard for shard, held in found.items() for name in held} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for held in found.values() for t in held.values())
    expected = logits_of(built, tokens(), 61)
    assert_same_logits(their_logits(their_model(tmp_path / "hf")), expected)
    convert.import_model(tmp_path / "hf", tmp_path / "back")
    assert torch.equal(our_logits(tmp_path / "back"), expected), "there and back no bit has changed"


def test_sixteen_bit_weights_and_old_names_are_read(tmp_path: Path) -> None:
    """The first GPT-2 files have no prefix, and hold the attention masks."""
    model = theirs(tmp_path / "hf", "gpt2").bfloat16()
    old = {name.removeprefix("transformer."): tensor.clone() for name, tensor in model.state_dict().items()}
    assert "lm_head.weight" in old, "a tied model may hold it twice"
    old["h.0.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH)
    (tmp_path / "hf" / "model.safetensors").unlink()
    save_file(old, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    done = convert.import_model(tmp_path / "hf", tmp_path / "ours")
    assert done.notes == ()
    assert_same_logits(our_logits(tmp_path / "ours"), their_logits(model.float()))


@pytest.mark.parametrize("case", ["gpt2", "llama with biases, tied"])
def test_a_head_of_its_own_is_kept_though_the_config_says_tied(case: str, tmp_path: Path) -> None:
    """As transformers does, and every command says so."""
    from transformers import AutoModelForCausalLM

    model = theirs(tmp_path / "hf", case)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    head = tensors["lm_head.weight"] = tensors["lm_head.weight"] + torch.randn(61, 1) / 4
    (tmp_path / "hf" / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert expected.config.tie_word_embeddings
    torch.testing.assert_close(expected.lm_head.weight, head)
    said = "lm_head.weight differs from the word embedding and is kept, though tie_word_embeddings is true"
    assert said in convert.import_model(tmp_path / "hf", tmp_path / "ours").notes
    assert_same_logits(our_logits(tmp_path / "ours"), their_logits(expected))
    with pytest.warns(UserWarning, match=said):
        assert not load(tmp_path / "hf").run.one("model").options.tie_embeddings
    convert.export_model(tmp_path / "ours", tmp_path / "back", "huggingface")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert_same_logits(their_logits(again), their_logits(expected))


def test_values_that_are_no_numbers_are_said(tmp_path: Path) -> None:
    model = theirs(tmp_path / "hf", "gpt2")
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors["transformer.ln_f.bias"][:2] = torch.tensor([torch.nan, torch.inf])
    (tmp_path / "hf" / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    notes = convert.import_model(tmp_path / "hf", tmp_path / "ours").notes
    assert notes == ("2 values are NaN or infinite, the first of them in final_norm.bias",)


def test_older_places_of_the_rotation_are_read(tmp_path: Path) -> None:
    model = theirs(tmp_path / "hf", "llama with biases, tied")
    config = edit(tmp_path / "hf", rope_parameters=None)
    assert "rope_theta" not in config
    edit(tmp_path / "hf", rope_theta=500.0, rope_scaling=None)
    convert.import_model(tmp_path / "hf", tmp_path / "ours")
    assert_same_logits(our_logits(tmp_path / "ours"), their_logits(model))


def edit(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change keys of ``config.json``; None removes one."""
    path = folder / "config.json"
    config: dict[str, Any] = {**json.loads(path.read_text()), **changes}
    config = {key: value for key, value in config.items() if value is not None}
    path.write_text(json.dumps(config))
    return config


@pytest.mark.parametrize(
    ("case", "changes", "reasons"),
    [
        ("gpt2", {"activation_function": "relu"}, ["activation_function='relu'"]),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "add_cross_attention": True}, ["inverse", "cross"]),
        ("gpt2", {"model_type": "opt"}, ["type 'opt'", "gpt2, llama"]),
        ("gpt2", {"n_layer": 3}, ["it lacks h.2."]),
        ("gpt2", {"n_positions": 8}, ["wpe.weight is [16, 24] there and [8, 24] here"]),
        ("gpt2", {"n_head": "many"}, ["num_heads"]),
        ("gpt2", {"tie_word_embeddings": False}, ["it lacks lm_head.weight"]),
        ("llama", {"num_hidden_layers": 1}, ["it also has layers.1."]),
        ("llama", {"head_dim": 8, "hidden_act": "gelu"}, ["hidden_act='gelu' (only 'silu')"]),
        ("llama", {"head_dim": 8}, ["q_proj.weight is [24, 24] there and [48, 24] here"]),
        ("llama", {"mlp_bias": True}, ["mlp_bias=True"]),
        ("llama", {"quantization_config": {"bits": 4}}, ["quantised"]),
        ("llama", {"rope_parameters": {"rope_type": "su", "factor": 8.0}}, ["rope_type='su'"]),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2}}, ["rope_type='dynamic'"]),
        ("llama", {"num_attention_heads": 0}, ["num_heads"]),
    ],
)
def test_what_has_no_counterpart_is_refused_with_every_reason(
    case: str, changes: Mapping[str, Any], reasons: list[str], tmp_path: Path
) -> None:
    theirs(tmp_path / "hf", case)
    edit(tmp_path / "hf", **changes)
    with pytest.raises(RunError) as error:
        convert.import_model(tmp_path / "hf", tmp_path / "ours")
    assert [reason for reason in reasons if reason not in str(error.value)] == []
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_a_key_of_null_says_nothing(case: str, tmp_path: Path) -> None:
    """As programs write it that take something out of a model, such as its quantisation."""
    model = theirs(tmp_path / "hf", case)
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": None, "rope_scaling": None}))
    convert.import_model(tmp_path / "hf", tmp_path / "ours")
    assert_same_logits(our_logits(tmp_path / "ours"), their_logits(model))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_named_with_what_to_type(name: str, tmp_path: Path) -> None:
    theirs(tmp_path / "hf", "gpt2")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"
    (tmp_path / "hf" / name).write_text(pointer)
    with pytest.raises(RunError, match=rf"{name} is not the file itself: .*git-lfs.*; run git lfs pull"):
        convert.import_model(tmp_path / "hf", tmp_path / "ours")


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        (
            {"attention.qk_norm": "head"},
            ["gpt2: model.attention.qk_norm=head (the family has none)", "starcoder2: model.position=learned"],
        ),
        ({"norm.kind": "rmsnorm"}, ["gpt2: model.norm.kind=rmsnorm (the family has layernorm)"]),
        ({"bias": False}, ["model.bias=false (the family has true)"]),
        ({"num_kv_heads": 1}, ["model.num_kv_heads=1"]),
        ({"experts.count": 2}, ["gpt2: model.experts.count=2 (the family has 0)"]),
    ],
)
def test_a_model_between_the_families_is_not_exported(
    changes: Mapping[str, Any], reasons: list[str], tmp_path: Path
) -> None:
    saved_network(tmp_path / "run", {**GPT2, **changes})
    with pytest.raises(RunError) as error:
        convert.export_model(tmp_path / "run", tmp_path / "hf", "huggingface")
    assert [reason for reason in reasons if reason not in str(error.value)] == []
    assert str(error.value).endswith("; --to distributed writes any model")
    assert list(tmp_path.iterdir()) == [tmp_path / "run"], "nothing is left behind"


def test_the_model_may_have_been_chosen_with_its_distribution(tmp_path: Path) -> None:
    options = options_of(GPT2)
    save_model(tmp_path / "run", logical_values(network(options).infos), options, use="megatron-run-engine:gpt")
    convert.export_model(tmp_path / "run", tmp_path / "hf", "huggingface")
    save_model(tmp_path / "other", logical_values(network(options).infos), options, use="acme:gpt")
    with pytest.raises(RunError, match="the model is acme:gpt"):
        convert.export_model(tmp_path / "other", tmp_path / "no", "huggingface")


def test_pickled_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    theirs(tmp_path / "hf", "gpt2")
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(RunError, match=r"pytorch_model.bin is a pickle.*save_pretrained"):
        convert.import_model(tmp_path / "hf", tmp_path / "ours")


@pytest.mark.timeout(20)
def test_more_layers_than_the_files_hold_are_refused_at_once(tmp_path: Path) -> None:
    theirs(tmp_path / "hf", "gpt2")
    edit(tmp_path / "hf", n_layer=10**9)
    with pytest.raises(RunError, match="1000000000 layers: its files hold at most"):
        convert.import_model(tmp_path / "hf", tmp_path / "ours")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_of_any_length_is_not_read_whole(tmp_path: Path, name: str) -> None:
    theirs(tmp_path / "hf", "gpt2", max_shard_size="8KB")
    with (tmp_path / "hf" / name).open("wb") as file:
        file.truncate(40 << 30)
    with pytest.raises(RunError, match="is too large"):
        convert.import_model(tmp_path / "hf", tmp_path / "ours")


def test_an_index_names_no_file_elsewhere(tmp_path: Path) -> None:
    theirs(tmp_path / "hf", "gpt2", max_shard_size="8KB")
    index = tmp_path / "hf" / model_folder.INDEX
    index.write_text(json.dumps({"weight_map": {"wte.weight": "../model.safetensors"}}))
    with pytest.raises(RunError, match="is not a file beside it"):
        convert.import_model(tmp_path / "hf", tmp_path / "ours")


def test_what_changes_no_logit_is_said(tmp_path: Path) -> None:
    theirs(tmp_path / "hf", "gpt2")
    edit(tmp_path / "hf", attn_pdrop=0.5)
    (note,) = convert.import_model(tmp_path / "hf", tmp_path / "ours").notes
    assert "attn_pdrop=0.5" in note


def test_a_model_with_tensors_of_its_own_is_not_exported(tmp_path: Path) -> None:
    options = options_of(GPT2)
    values = {**logical_values(network(options).infos), "layers.0.router.weight": torch.ones(2, 2)}
    save_model(tmp_path / "run", values, options)
    with pytest.raises(RunError, match=r"it also has layers.0.router.weight"):
        convert.export_model(tmp_path / "run", tmp_path / "hf", "huggingface")
