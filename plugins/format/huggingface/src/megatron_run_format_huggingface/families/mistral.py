"""Mistral (Jiang et al. 2023): Llama without biases, with a window in all layers."""

from __future__ import annotations

from megatron_run_format_huggingface.families.llama import DEFAULTS, LLAMA
from megatron_run_format_huggingface.sections import rope

MISTRAL = LLAMA._replace(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={
        **DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    keys={**LLAMA.keys, "attention.window": "sliding_window"},
    fixed={**LLAMA.fixed, "bias": False},
    only={**LLAMA.only, "layer_types": (None,)},
    sections=(rope(),),
)
