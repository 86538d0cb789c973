"""Adapters beside PEFT's: the same losses step by step, and the same model when both are merged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from megatron_run.planning import load_config
from megatron_run_engine import train
from megatron_run_engine.formats.convert import export_model, import_model
from megatron_run_engine.runtime.rng import initial_generator

#: What PEFT asks of transformers, as transformers now calls it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

VOCAB, LENGTH, RANK, ALPHA, STEPS, RATE, SEED = 16, 8, 4, 8.0, 4, 0.02, 5
#: Our names of a layer's matrices, and those of transformers' Llama.
MATRICES = {
    "attention.qkv.query": "self_attn.q_proj",
    "attention.qkv.key": "self_attn.k_proj",
    "attention.qkv.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.input.gate": "mlp.gate_proj",
    "mlp.input.up": "mlp.up_proj",
    "mlp.output": "mlp.down_proj",
}
#: Samples that count: as many as token ids, so that a step of that many sees each once, in whatever order.
COUNTING = Path(__file__).parents[3] / "examples" / "plugins" / "data.py"


def save_llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=LENGTH, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)


def peft_losses(folder: Path, targets: dict[str, str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of each step, and the merged weights. Adapters begin with the values that ours have for the seed."""
    from transformers import LlamaForCausalLM

    peft = pytest.importorskip("peft", reason="an oracle of requirements-dev.txt")
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    names = [theirs.rpartition(".")[2] for theirs in targets.values()]
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names))
    for layer in range(2):
        for ours, theirs in targets.items():
            down = model.get_submodule(f"base_model.model.model.layers.{layer}.{theirs}.lora_A.default").weight
            assert down.abs().max() <= 1 / math.sqrt(down.shape[1]), "PEFT starts within the same bounds"
            generator = initial_generator(SEED, f"layers.{layer}.{ours}.lora_a.weight")
            bound = 1 / math.sqrt(down.shape[1])
            down.data = torch.empty_like(down).uniform_(-bound, bound, generator=generator)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    windows = (torch.arange(VOCAB)[:, None] + torch.arange(LENGTH + 1)) % VOCAB
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(input_ids=windows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.merge_and_unload().state_dict()


@pytest.mark.parametrize("words", ["all", "query,value"])
def test_losses_and_the_merged_model_are_peft_s(words: str, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    save_llama(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "ours")
    targets = {
        our: their for our, their in MATRICES.items() if words == "all" or our.split(".")[-1] in words.split(",")
    }
    expected, merged = peft_losses(tmp_path / "hf", targets)
    sets = {
        "train.steps": STEPS,
        "train.micro_batch_size": 4,
        "train.global_batch_size": VOCAB,
        "train.lr": RATE,
        "train.lr_shape": "constant",
        "train.lr_warmup": "0",
        "train.weight_decay": 0.0,
        "train.clip_norm": 0.0,
        "train.seed": SEED,
        "data.vocab_size": VOCAB,
        "model.dropout": 0.0,
        "eval.interval": 0,
        "run.folder": str(tmp_path / "run"),
        "run.threads": 1,
    }
    layers = f"parallel-layer=dense+lora,rank={RANK},alpha={ALPHA},targets={words}"
    result = train(load_config(tmp_path / "ours" / "config.yaml", sets=sets, plugins=[f"data={COUNTING}", layers]))
    torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(expected), rtol=0, atol=1e-5)
    assert expected[-1] < expected[0] - 0.03, "the adapters learn"

    export_model(tmp_path / "run", tmp_path / "back", "huggingface")
    back = LlamaForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert back.keys() == merged.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(back[name], weight, rtol=0, atol=1e-4)
