"""GPT-NeoX and Pythia (Black et al. 2022, Biderman et al. 2023): both halves of a layer read the same stream.

A quarter of a head's features rotate. Query, key and value of a head lie together in one matrix.
"""

from __future__ import annotations

from megatron_run_format_huggingface.families.llama import DEFAULTS, KEYS
from megatron_run_format_huggingface.family import Family, Fused
from megatron_run_format_huggingface.sections import activation, rope

_OTHERS = ("num_key_value_heads", "head_dim", "rms_norm_eps")

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    defaults={
        **{key: value for key, value in DEFAULTS.items() if key not in _OTHERS},
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "hidden_dropout": 0.0,
        "use_parallel_residual": True,
        "attention_bias": True,
    },
    keys={
        **{option: key for option, key in KEYS.items() if key not in _OTHERS},
        "norm.eps": "layer_norm_eps",
        "parallel_residual": "use_parallel_residual",
    },
    fixed={"norm.kind": "layernorm", "bias": True},
    only={"attention_bias": (True,)},
    sections=(
        rope(fraction=0.25, theta_key="rotary_emb_base", fraction_key="rotary_pct"),
        activation("hidden_act", {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}),
    ),
    tensors={
        "embed_in": "embedding.word",
        "final_layer_norm": "final_norm",
        "embed_out": "output",
        "layers.{layer}.input_layernorm": "layers.{layer}.attention.qkv.norm",
        "layers.{layer}.post_attention_layernorm": "layers.{layer}.mlp.input.norm",
        "layers.{layer}.attention.query_key_value": Fused(
            tuple(f"layers.{{layer}}.attention.qkv.{name}" for name in ("query", "key", "value")), by_head=True
        ),
        "layers.{layer}.attention.dense": "layers.{layer}.attention.output",
        "layers.{layer}.mlp.dense_h_to_4h": "layers.{layer}.mlp.input.up",
        "layers.{layer}.mlp.dense_4h_to_h": "layers.{layer}.mlp.output",
    },
    dropouts=("hidden_dropout", "attention_dropout"),
    prefix="gpt_neox.",
    head="embed_out",
)
