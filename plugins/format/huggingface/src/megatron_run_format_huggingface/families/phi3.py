"""Phi-3 (Abdin et al. 2024): Llama with query, key and value in one matrix, and gate and up in another."""

from __future__ import annotations

from megatron_run_format_huggingface.families.llama import DEFAULTS, ENDS, KEYS, LLAMA, NORMS
from megatron_run_format_huggingface.family import Fused
from megatron_run_format_huggingface.sections import rope

PHI3 = LLAMA._replace(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults={
        **DEFAULTS,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "sliding_window": None,
    },
    keys={**KEYS, "attention_window": "sliding_window"},
    fixed={**LLAMA.fixed, "bias": False},
    # Its longer ones have a list of factors (longrope), which it also calls su and yarn.
    sections=(rope(kinds=("default",)),),
    tensors={
        **ENDS,
        **NORMS,
        "layers.{layer}.self_attn.qkv_proj": Fused(
            tuple(f"layers.{{layer}}.attention.qkv.{name}" for name in ("query", "key", "value"))
        ),
        "layers.{layer}.self_attn.o_proj": "layers.{layer}.attention.output",
        "layers.{layer}.mlp.gate_up_proj": Fused(("layers.{layer}.mlp.input.gate", "layers.{layer}.mlp.input.up")),
        "layers.{layer}.mlp.down_proj": "layers.{layer}.mlp.output",
    },
    dropouts=("resid_pdrop", "embd_pdrop", "attention_dropout"),
)
