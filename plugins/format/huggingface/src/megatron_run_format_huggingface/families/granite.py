"""Granite 3 (IBM 2024): Llama with a factor each on embeddings, attention, residual branches and logits."""

from __future__ import annotations

from megatron_run_format_huggingface.families.llama import LLAMA
from megatron_run_format_huggingface.family import Section

GRANITE = LLAMA._replace(
    model_type="granite",
    architecture="GraniteForCausalLM",
    defaults={
        **LLAMA.defaults,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    keys={
        **LLAMA.keys,
        "embedding_scale": "embedding_multiplier",
        "attention.scale": "attention_multiplier",
        "residual_scale": "residual_multiplier",
    },
    sections=(
        *LLAMA.sections,
        # Theirs divides.
        Section(
            lambda config: {"logits_scale": 1 / config["logits_scaling"]},
            lambda options: {"logits_scaling": 1 / options["logits_scale"]},
        ),
    ),
)
