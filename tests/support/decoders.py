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
        "rope.theta": 300.0,
        "rope.scaling": "linear",
        "rope.factor": 2.0,
        "attention.window": 5,
        "attention.window_pattern": (1, 0),
        "rope.window_theta": 50.0,
        "attention.scale": 0.6,
        "attention.softcap": 2.0,
        "norm.kind": "rmsnorm_1p",
        "norm.placement": "sandwich",
        "attention.qk_norm": "head",
        "activation": "geglu_tanh",
        "bias": False,
        "embedding_scale": 3.0,
        "logits_scale": 0.5,
        "logits_softcap": 4.0,
    },
    "neox": {
        "position": "rope",
        "rope.fraction": 0.5,
        "rope.scaling": "yarn",
        "rope.factor": 4.0,
        "rope.original_length": 6,
        "rope.high_freq": 3.0,
        "head_size": 8,
        "norm.kind": "layernorm_1p",
        "attention.qk_norm": "head",
        "activation": "relu_squared",
        "attention.qkv_bias": False,
        "parallel_residual": True,
        "residual_scale": 0.7,
    },
    "olmo": {
        "num_kv_heads": 2,
        "position": "rope",
        "rope.theta": 100.0,
        "rope.scaling": "llama3",
        "rope.factor": 4.0,
        "rope.original_length": 12,
        "rope.low_freq": 0.5,
        "rope.high_freq": 1.5,
        "rope.pattern": (1, 1, 0),
        "attention.window": 7,
        "norm.kind": "rmsnorm",
        "norm.placement": "post",
        "attention.qk_norm": "full",
        "activation": "geglu",
        "bias": False,
        "attention.qkv_bias": True,
        "tie_embeddings": False,
    },
}
