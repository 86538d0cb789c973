"""Gemma 2 (Riviere et al. 2024): norms around both halves, times 1 + weight; soft-caps; a window in every other layer.

Gemma 3 (Kamath et al. 2025), text alone, has norms of query and key heads in place of the cap on attention, and layers
with a window rotate by a base of their own.
"""

from __future__ import annotations

from typing import Any

from megatron_run_format_huggingface.families.llama import ATTENTION, DEFAULTS, ENDS, KEYS, LLAMA, MLP, QK_NORMS
from megatron_run_format_huggingface.family import Config, Section
from megatron_run_format_huggingface.sections import FULL, SLIDING, rope, rotation, scaled, unscalable, windows, written

_DEFAULTS = {
    **{key: value for key, value in DEFAULTS.items() if key != "hidden_act"},
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_NORMS = {
    "layers.{layer}.input_layernorm": "layers.{layer}.attention.qkv.norm",
    "layers.{layer}.post_attention_layernorm": "layers.{layer}.attention_post_norm",
    "layers.{layer}.pre_feedforward_layernorm": "layers.{layer}.mlp.input.norm",
    "layers.{layer}.post_feedforward_layernorm": "layers.{layer}.feed_post_norm",
}
#: Embeddings grow by the root of the hidden size, products of query and key shrink by that of a number of their own.
_SCALES = Section(
    lambda config: {
        "embedding_scale": config["hidden_size"] ** 0.5,
        "attention.scale": config["query_pre_attn_scalar"] ** -0.5,
    },
    lambda options: {"query_pre_attn_scalar": round(options["attention.scale"] ** -2)},
)

GEMMA2 = LLAMA._replace(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    defaults=_DEFAULTS,
    keys={
        **KEYS,
        "head_size": "head_dim",
        "logits_softcap": "final_logit_softcapping",
        "attention.softcap": "attn_logit_softcapping",
    },
    fixed={"norm.kind": "rmsnorm_1p", "norm.placement": "sandwich", "activation": "geglu_tanh", "bias": False},
    only={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "use_bidirectional_attention": (None, False),
    },
    sections=(rope(), windows(lambda _, layer: layer % 2 == 0), _SCALES),
    tensors={**ENDS, **ATTENTION, **MLP, **_NORMS},
)


def _rotations(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of layers that see all tokens, and of those with a window, from either version's place."""
    found = config.get("rope_parameters") or {}
    full = {
        "rope_theta": config.get("rope_theta") or 1e6,
        **(found.get(FULL) or {}),
        **(config.get("rope_scaling") or {}),
    }
    local = {"rope_theta": config.get("rope_local_base_freq") or 1e4, **(found.get(SLIDING) or {})}
    return rotation(full), rotation(local)


def _write(options: Config) -> dict[str, Any]:
    local = options["rope.window_theta"] or options["rope.theta"]
    found = {FULL: written(options), SLIDING: {"rope_type": "default", "rope_theta": local}}
    return {"rope_parameters": found, "rope_theta": options["rope.theta"], "rope_local_base_freq": local}


_TWO_ROTATIONS = Section(
    lambda config: {
        **scaled(_rotations(config)[0], config),
        "rope.window_theta": _rotations(config)[1]["rope_theta"],
    },
    _write,
    lambda config: unscalable(_rotations(config)[0]) + unscalable(_rotations(config)[1], ("default",)),
)

GEMMA3 = GEMMA2._replace(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults={
        **_DEFAULTS,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    keys={**KEYS, "head_size": "head_dim", "logits_softcap": "final_logit_softcapping"},
    fixed={**GEMMA2.fixed, "attention.qk_norm": "head"},
    only={**GEMMA2.only, "attn_logit_softcapping": (None,)},
    sections=(
        _TWO_ROTATIONS,
        windows(lambda config, layer: (layer + 1) % (config.get("sliding_window_pattern") or 6) > 0),
        _SCALES,
    ),
    tensors={**GEMMA2.tensors, **QK_NORMS},
)
