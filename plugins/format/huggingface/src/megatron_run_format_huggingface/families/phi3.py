"""Phi-3 (Abdin et al. 2024): Llama with query, key and value in one matrix, and gate and up in another."""

from __future__ import annotations

from megatron_run_format_huggingface.families.llama import DEFAULTS, ENDS, KEYS, LLAMA, NORMS
from megatron_run_format_huggingface.family import Config, Fused
from megatron_run_format_huggingface.sections import rope, rotation

_ROPE = rope(fraction=1.0, kinds=("default", "longrope"), length_key="original_max_position_embeddings")
_NAMES = {"su": "longrope", "yarn": "longrope"}


def _named(config: Config) -> Config:
    """``config`` with today's name of a list of factors, which older files call su or yarn."""
    found = rotation(config.get("rope_scaling") or config.get("rope_parameters") or {})
    named = {**found, "rope_type": _NAMES.get(found["rope_type"], found["rope_type"])}
    return {**config, "rope_scaling": None, "rope_parameters": named}


def _unsupported(config: Config) -> list[str]:
    return _ROPE.unsupported(_named(config))


PHI3 = LLAMA._replace(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults={
        **DEFAULTS,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "sliding_window": None,
    },
    keys={**KEYS, "attention.window": "sliding_window"},
    fixed={**LLAMA.fixed, "bias": False},
    sections=(_ROPE._replace(read=lambda config: _ROPE.read(_named(config)), unsupported=_unsupported),),
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
