"""StableLM 2 (Bellagente et al. 2024): Llama with layer norms, a quarter of whose heads' features rotate."""

from __future__ import annotations

from megatron_run_format_huggingface.families.llama import DEFAULTS, KEYS, LLAMA
from megatron_run_format_huggingface.sections import rope

STABLELM = LLAMA._replace(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    defaults={
        **DEFAULTS,
        "vocab_size": 50304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "hidden_dropout": 0.0,
    },
    keys={**KEYS, "norm.eps": "layer_norm_eps", "attention.qkv_bias": "use_qkv_bias"},
    fixed={"norm.kind": "layernorm", "activation": "swiglu", "bias": False},
    # In parallel, both halves would share a norm; theirs of queries and keys has weights of its own for each head.
    only={"hidden_act": ("silu",), "use_parallel_residual": (False,), "qk_layernorm": (False,)},
    sections=(rope(fraction=0.25),),
    dropouts=("hidden_dropout", "attention_dropout"),
)
