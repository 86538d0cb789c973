"""Adapters between PEFT and runs: both compute the same with them, and no bit of A or B is lost on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_run import load
from megatron_run.config.request import Request
from megatron_run.errors import RunError
from megatron_run.planning import load_config
from megatron_run_engine import train
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.data.standalone_tokenizer import byte_tokenizer_json
from megatron_run_engine.formats import convert
from megatron_run_engine.formats.convert import read_step
from tests.plugins.format.huggingface import test_format_huggingface_bert as bert
from tests.plugins.format.huggingface.family_cases import VOCAB
from tests.plugins.format.huggingface.test_format_huggingface_families import batch, theirs
from tests.support.forked import run_forked

#: What PEFT asks of transformers, as transformers now calls it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

RANK = 3
SETS = {
    "train.steps": 3,
    "train.lr": 0.05,
    "train.lr_shape": "constant",
    "train.sequence_length": 16,
    "train.global_batch_size": 2,
    "train.micro_batch_size": 2,
    "data.vocab_size": VOCAB,
    "eval.interval": 0,
    "run.threads": 1,
}
#: Families with matrices of one part and of several, transposed, by heads, and with rows in another order; and what
#: is adapted of ours, by ends of names.
TRAINED = {
    "llama": "all",
    "gemma2": "query,value",
    "qwen2": "layers.1.attention.output,mlp.input.up",
    "qwen3 with experts": "query,value,attention.output",
    "gpt2": "query,value,mlp.output",
    "phi3": "all",
    "gpt_neox": "all",
    "deepseek v3": "attention.query.query,key_value.key,value,attention.output",
}
#: What PEFT adapts of some families, by its own names.
ADAPTED = {
    "llama": ["q_proj", "v_proj", "down_proj", "lm_head"],
    "gemma3": ["k_proj", "o_proj"],
    "qwen2": ["q_proj", "gate_proj"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "phi3": ["qkv_proj", "gate_up_proj", "o_proj"],
    "gpt_neox": ["query_key_value", "dense"],
    "deepseek v3": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}


def by_day(cases: Iterable[str]) -> list[Any]:
    """The ``cases``, of which Gemma's and Qwen's run by night: llama has matrices like theirs."""
    rare = ("gemma2", "gemma3", "qwen2")
    return [pytest.param(case, marks=[pytest.mark.nightly] * (case in rare)) for case in cases]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By case, a folder with a random model of transformers in ``hf``, and ``ours``, imported from it."""

    @cache
    def make(case: str) -> Path:
        folder = tmp_path_factory.mktemp("base")
        theirs(case, folder / "hf")
        convert.import_model(folder / "hf", folder / "ours")
        return folder

    return make


def values(folder: Path, weights: Path) -> dict[str, Any]:
    return {**SETS, "run.folder": str(folder), "run.init_from": str(weights)}


def layers(targets: str, below: str = "dense") -> str:
    return f"parallel-layer={below}+lora,rank={RANK},alpha=7,adapter_dropout=0.1,targets={targets}"


def adapt(folder: Path, weights: Path, targets: str) -> None:
    """Train adapters of the ``weights``."""
    config = next(weights.glob("config.yaml"), None) or weights / "config.resolved.yaml"
    train(load_config("preset:tiny", config, sets=values(folder, weights), plugins=[layers(targets)]))


def library() -> Any:
    """PEFT, imported when a test needs it."""
    return pytest.importorskip("peft", reason="an oracle of requirements-dev.txt")


def adapted_by_peft(folder: Path, adapters: Path) -> Any:
    """The model in ``folder`` with adapters. PEFT warns, and so fails, of what lacks a tensor or a module."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return library().PeftModel.from_pretrained(model, adapters).eval()


def saved_by_peft(folder: Path, adapters: Path, **config: Any) -> Any:
    """The model in ``folder`` with random adapters, which PEFT saves in ``adapters``."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(4)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    peft = library()
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=5, **config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(adapters, save_embedding_layers=False)
    return model


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=batch()["tokens"]).logits
    return logits


def ours(folder: Path) -> Tensor:
    logits: Tensor = load(folder)(batch()["tokens"].tolist())
    return logits[..., :VOCAB]


def bits(folder: Path) -> dict[str, Tensor]:
    """The tensors of a saved step, as they lie there."""
    checkpoints = Checkpoints(folder / "checkpoints")
    adapters = read_step(checkpoints, checkpoints.steps()[-1]).adapters
    assert adapters is not None
    return {name: read() for name, read in adapters.tensors.items()}


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("case", by_day(TRAINED))
def test_peft_computes_what_we_trained_and_gives_every_bit_back(
    case: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = base(case)
    adapt(tmp_path / "run", folder / "ours", TRAINED[case])
    (tmp_path / "run" / "tokenizer.json").write_bytes(byte_tokenizer_json())
    convert.export_model(tmp_path / "run", tmp_path / "peft", "peft")
    (tmp_path / "run" / "tokenizer.json").unlink()  # it has more tokens than a model that is loaded may lack
    assert sorted(path.name for path in (tmp_path / "peft").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    model = adapted_by_peft(folder / "hf", tmp_path / "peft")
    expected = ours(tmp_path / "run")
    assert (ours(folder / "ours") - expected).abs().max() > 1e-2, "the adapters have learned"
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-5, atol=2e-5)
    said = model.peft_config["default"]
    assert (said.r, said.lora_alpha, said.lora_dropout) == (RANK, 7, 0.1)
    assert said.base_model_name_or_path == str(folder / "hf")

    convert.import_model(tmp_path / "peft", tmp_path / "back", base=folder / "ours")
    assert equal(bits(tmp_path / "back"), bits(tmp_path / "run"))
    torch.testing.assert_close(ours(tmp_path / "back"), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", by_day(ADAPTED))
def test_we_compute_what_peft_saved_and_give_every_bit_back(
    case: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = base(case)
    model = saved_by_peft(
        folder / "hf", tmp_path / "peft", target_modules=ADAPTED[case], fan_in_fan_out=case == "gpt2", use_rslora=True
    )
    done = convert.import_model(tmp_path / "peft", tmp_path / "run", base=folder / "ours")
    assert done.format == "peft"
    assert done.notes == (f"they adapt the weights in {folder / 'ours' / 'checkpoints' / 'step0'}, which must stay",)
    expected = logits_of(model)
    assert (ours(folder / "ours") - expected).abs().max() > 1e-2
    torch.testing.assert_close(ours(tmp_path / "run"), expected, rtol=1e-5, atol=2e-5)
    convert.export_model(tmp_path / "run", tmp_path / "back", "peft")
    assert equal(*(load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "back")))
    torch.testing.assert_close(
        logits_of(adapted_by_peft(folder / "hf", tmp_path / "back")), expected, rtol=0, atol=1e-5
    )


def test_what_peft_leaves_to_single_layers_and_modules_is_read_from_its_tensors(
    base: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = base("llama")
    model = saved_by_peft(
        folder / "hf",
        tmp_path / "peft",
        target_modules=["q_proj", "o_proj", "down_proj"],
        layers_to_transform=[0, 2],
        rank_pattern={"o_proj": 5, "^model.layers.2.mlp.down_proj": 2},
        alpha_pattern={"layers.2.self_attn.q_proj": 9},
    )
    convert.import_model(tmp_path / "peft", tmp_path / "run", base=folder / "ours")
    found = bits(tmp_path / "run")
    assert sorted({name.split(".")[1] for name in found}) == ["0", "2"]
    assert found["layers.0.attention.output.lora_a.weight"].shape[0] == 5
    expected = logits_of(model)
    torch.testing.assert_close(ours(tmp_path / "run"), expected, rtol=1e-5, atol=2e-5)
    convert.export_model(tmp_path / "run", tmp_path / "back", "peft")
    torch.testing.assert_close(
        logits_of(adapted_by_peft(folder / "hf", tmp_path / "back")), expected, rtol=0, atol=2e-5
    )


def test_adapters_upon_adapters_are_adapters_of_the_first_model(base: Callable[[str], Path], tmp_path: Path) -> None:
    """So that what began with PEFT's and went on here is used there with the same model."""
    folder = base("phi3")
    saved_by_peft(folder / "hf", tmp_path / "peft", target_modules=["qkv_proj", "down_proj"])
    convert.import_model(tmp_path / "peft", tmp_path / "imported", base=folder / "ours")
    adapt(tmp_path / "run", tmp_path / "imported", "query,output")
    convert.export_model(tmp_path / "run", tmp_path / "back", "peft")
    said = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(folder / "hf")
    expected = ours(tmp_path / "run")
    assert (ours(tmp_path / "imported") - expected).abs().max() > 1e-2
    torch.testing.assert_close(
        logits_of(adapted_by_peft(folder / "hf", tmp_path / "back")), expected, rtol=0, atol=2e-5
    )


@pytest.mark.multiproc
def test_adapters_that_tensor_parallel_ranks_trained_are_whole(base: Callable[[str], Path], tmp_path: Path) -> None:
    folder = base("gpt_neox")
    sets = {**values(tmp_path / "run", folder / "ours"), "parallel.tensor": 2, "parallel.sequence": True}
    request = Request(
        ("preset:tiny", str(folder / "ours" / "config.yaml")),
        sets=tuple(f"{key}={value}" for key, value in sets.items()),
        plugins=(layers("all", "tensor"),),
        nproc=2,
    )
    ran = run_forked(request)
    assert ran.code == 0, ran.message
    convert.export_model(tmp_path / "run", tmp_path / "peft", "peft")
    expected = ours(tmp_path / "run")
    assert (ours(folder / "ours") - expected).abs().max() > 1e-2
    torch.testing.assert_close(
        logits_of(adapted_by_peft(folder / "hf", tmp_path / "peft")), expected, rtol=0, atol=2e-5
    )


def test_adapters_of_bert_come_and_go(tmp_path: Path) -> None:
    """What the merged model is, both ways: its logits are compared without adapters."""
    peft = library()
    model = peft.get_peft_model(
        bert.theirs(tmp_path / "hf", "BertForMaskedLM"),
        peft.LoraConfig(r=RANK, target_modules=["query", "attention.output.dense", "intermediate.dense"]),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "peft")
    convert.import_model(tmp_path / "hf", tmp_path / "ours")
    convert.import_model(tmp_path / "peft", tmp_path / "run", base=tmp_path / "ours")
    convert.export_model(tmp_path / "run", tmp_path / "back", "peft")
    assert equal(*(load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "back")))
    convert.export_model(tmp_path / "run", tmp_path / "merged", "huggingface")
    merged = model.merge_and_unload().state_dict()
    for name, weight in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(weight, merged[name], rtol=0, atol=1e-5)


def test_adapters_that_peft_would_give_to_experts_are_not_exported(base: Callable[[str], Path], tmp_path: Path) -> None:
    adapt(tmp_path / "run", base("qwen3 with experts") / "ours", "mlp.input.up,query")
    with pytest.raises(RunError, match=r"as those of all experts.*: model.layers.1.mlp.up_proj; --to huggingface"):
        convert.export_model(tmp_path / "run", tmp_path / "peft", "peft")
    assert not (tmp_path / "peft").exists()
