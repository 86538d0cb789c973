"""Llama 1 to 3.3 (Touvron et al. 2023, Grattafiori et al. 2024), and the tables from which its many relatives differ.

Rotary positions, root-mean-square norms, SwiGLU, grouped key-value heads. ``transformers`` rotates feature j together
with feature j + d/2, as we do, so no row moves.
"""

from __future__ import annotations

from megatron_run_format_huggingface.family import Config, Family, Section
from megatron_run_format_huggingface.sections import rope

#: Keys of Llama and of most families after it.
KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm.eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
ATTENTION = {
    "layers.{layer}.self_attn.q_proj": "layers.{layer}.attention.qkv.query",
    "layers.{layer}.self_attn.k_proj": "layers.{layer}.attention.qkv.key",
    "layers.{layer}.self_attn.v_proj": "layers.{layer}.attention.qkv.value",
    "layers.{layer}.self_attn.o_proj": "layers.{layer}.attention.output",
}
QK_NORMS = {
    "layers.{layer}.self_attn.q_norm": "layers.{layer}.attention.qk_norm.query",
    "layers.{layer}.self_attn.k_norm": "layers.{layer}.attention.qk_norm.key",
}
MLP = {
    "layers.{layer}.mlp.gate_proj": "layers.{layer}.mlp.input.gate",
    "layers.{layer}.mlp.up_proj": "layers.{layer}.mlp.input.up",
    "layers.{layer}.mlp.down_proj": "layers.{layer}.mlp.output",
}
NORMS = {
    "layers.{layer}.input_layernorm": "layers.{layer}.attention.qkv.norm",
    "layers.{layer}.post_attention_layernorm": "layers.{layer}.mlp.input.norm",
}
ENDS = {"embed_tokens": "embedding.word", "norm": "final_norm", "lm_head": "output"}
#: Values in ``transformers`` of keys that ``config.json`` leaves out.
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}


def _biases(config: Config) -> list[str]:
    attention, mlp = config["attention_bias"], config["mlp_bias"]
    return [] if attention == mlp else [f"mlp_bias={mlp} (only as attention_bias={attention})"]


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={**DEFAULTS, "attention_bias": False, "mlp_bias": False},
    keys={**KEYS, "head_size": "head_dim"},
    fixed={"norm.kind": "rmsnorm", "activation": "swiglu"},
    only={"hidden_act": ("silu",)},
    sections=(
        rope(),
        Section(
            lambda config: {"bias": config["attention_bias"]},
            lambda options: {"attention_bias": options["bias"], "mlp_bias": options["bias"]},
            _biases,
        ),
    ),
    tensors={**ENDS, **ATTENTION, **MLP, **NORMS},
)
