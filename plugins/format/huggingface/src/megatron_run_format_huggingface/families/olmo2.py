"""OLMo 2 (OLMo et al. 2024): Llama with norms on what each half adds, and over all queries and all keys."""

from __future__ import annotations

from megatron_run_format_huggingface.families.llama import ATTENTION, DEFAULTS, ENDS, KEYS, LLAMA, MLP, QK_NORMS
from megatron_run_format_huggingface.sections import rope

OLMO2 = LLAMA._replace(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults={**DEFAULTS, "vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False},
    keys=KEYS,
    fixed={**LLAMA.fixed, "bias": False, "norm.placement": "post", "attention.qk_norm": "full"},
    only={"hidden_act": ("silu",), "attention_bias": (False,)},
    sections=(rope(),),
    tensors={
        **ENDS,
        **ATTENTION,
        **QK_NORMS,
        **MLP,
        "layers.{layer}.post_attention_layernorm": "layers.{layer}.attention_post_norm",
        "layers.{layer}.post_feedforward_layernorm": "layers.{layer}.feed_post_norm",
    },
)
