"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases of query, key and value, and windows in the later layers.

Qwen3 (Yang et al. 2025) has a norm of each query and key head in place of the biases, and its own head size.
"""

from __future__ import annotations

from megatron_run_format_huggingface.families.llama import ATTENTION, DEFAULTS, ENDS, KEYS, LLAMA, MLP, NORMS, QK_NORMS
from megatron_run_format_huggingface.sections import rope, windows

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
WINDOWS = windows(
    lambda config, layer: layer >= config["max_window_layers"],
    {True: {"use_sliding_window": True}, False: {"use_sliding_window": False}},
)

QWEN2 = LLAMA._replace(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults=_DEFAULTS,
    keys=KEYS,
    fixed={**LLAMA.fixed, "bias": False, "qkv_bias": True},
    sections=(rope(), WINDOWS),
)
QWEN3 = QWEN2._replace(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={**_DEFAULTS, "head_dim": 128, "attention_bias": False},
    keys={**KEYS, "head_size": "head_dim"},
    fixed={**LLAMA.fixed, "bias": False, "qk_norm": "head"},
    only={"hidden_act": ("silu",), "attention_bias": (False,)},
    tensors={**ENDS, **ATTENTION, **QK_NORMS, **MLP, **NORMS},
)
