"""A random Llama as Hugging Face keeps it, written without ever being in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megatron_run_engine.checkpoint.shard_file import DTYPES, encode_header, lay_out

#: Bytes of one file, about.
SHARD = 500_000_000


def write_llama(folder: Path, sizes: Mapping[str, int]) -> int:
    """Write a random Llama in bf16 into the new ``folder``, tensor by tensor; the number of its parameters."""
    heads = sizes["hidden_size"] // 64
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **sizes,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    files: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    size = parameters = 0
    for name, shape in _llama(sizes, sizes["hidden_size"] // 4):
        values = torch.Size(shape).numel()
        if files[-1] and size + 2 * values > SHARD:
            files.append({})
            size = 0
        files[-1][name] = ("BF16", shape)
        size, parameters = size + 2 * values, parameters + values
    places: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write(folder / file, tensors)
        places |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 2 * parameters}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return parameters


def _llama(sizes: Mapping[str, int], kv: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(sizes["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        for name in ("gate", "up"):
            yield f"{prefix}mlp.{name}_proj.weight", (ffn, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _write(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    entries = lay_out(tensors)
    with path.open("wb") as file:
        file.write(encode_header(entries, {"format": "pt"}))
        for entry in entries.values():
            values = torch.empty(entry.shape, dtype=DTYPES[entry.dtype]).uniform_(-0.05, 0.05)
            values.view(torch.uint8).numpy().tofile(file)
