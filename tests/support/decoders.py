"""Three small decoders that between them use every option in which families of dense models differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: For four heads in at least three layers, and sequences of 16 tokens; each has the name of the family nearest to it.
DECODERS: Mapping[str, Mapping[str, Any]] = {
    "gemma": {
        "num_kv_heads": 2,
        "head_size": 6,
        "position": "rope",
        "rope_theta": 300.0,
        "rope_scaling": "linear",
        "rope_factor": 2.0,
        "attention_window": 5,
        "window_pattern": (1, 0),
        "window_rope_theta": 50.0,
        "attention_scale": 0.6,
        "attention_softcap": 2.0,
        "norm": "rmsnorm_1p",
        "norm_placement": "sandwich",
        "qk_norm": "head",
        "activation": "geglu_tanh",
        "bias": False,
        "embedding_scale": 3.0,
        "logits_scale": 0.5,
        "logits_softcap": 4.0,
    },
    "neox": {
        "position": "rope",
        "rope_fraction": 0.5,
        "rope_scaling": "yarn",
        "rope_factor": 4.0,
        "rope_original_length": 6,
        "rope_high_freq": 3.0,
        "head_size": 8,
        "norm": "layernorm_1p",
        "qk_norm": "head",
        "activation": "relu_squared",
        "qkv_bias": False,
        "parallel_residual": True,
        "residual_scale": 0.7,
    },
    "olmo": {
        "num_kv_heads": 2,
        "position": "rope",
        "rope_theta": 100.0,
        "rope_scaling": "llama3",
        "rope_factor": 4.0,
        "rope_original_length": 12,
        "rope_low_freq": 0.5,
        "rope_high_freq": 1.5,
        "rope_pattern": (1, 1, 0),
        "attention_window": 7,
        "norm": "rmsnorm",
        "norm_placement": "post",
        "qk_norm": "full",
        "activation": "geglu",
        "bias": False,
        "qkv_bias": True,
        "tie_embeddings": False,
    },
}
