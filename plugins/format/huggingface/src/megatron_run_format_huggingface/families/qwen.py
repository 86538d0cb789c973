"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases of query, key and value, and windows in the later layers.

Qwen3 (Yang et al. 2025) has a norm of each query and key head in place of the biases, and its own head size. Qwen3-MoE
has experts, weighted by probabilities among all or among the chosen.
"""

from __future__ import annotations

from typing import Any

from megatron_run_format_huggingface.families.llama import ATTENTION, DEFAULTS, ENDS, KEYS, LLAMA, MLP, NORMS, QK_NORMS
from megatron_run_format_huggingface.families.mixtral import MIXTURE
from megatron_run_format_huggingface.family import Config, Either, Section
from megatron_run_format_huggingface.sections import rope, windows

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
WINDOWS = windows(
    lambda config, layer: layer >= config["max_window_layers"],
    {True: {"use_sliding_window": True}, False: {"use_sliding_window": False}},
)

QWEN2 = LLAMA._replace(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults=_DEFAULTS,
    keys=KEYS,
    fixed={**LLAMA.fixed, "bias": False, "attention.qkv_bias": True},
    sections=(rope(), WINDOWS),
)
QWEN3 = QWEN2._replace(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={**_DEFAULTS, "head_dim": 128, "attention_bias": False},
    keys={**KEYS, "head_size": "head_dim"},
    fixed={**LLAMA.fixed, "bias": False, "attention.qk_norm": "head"},
    only={"hidden_act": ("silu",), "attention_bias": (False,)},
    tensors={**ENDS, **ATTENTION, **QK_NORMS, **MLP, **NORMS},
)


#: The number of experts, by the version of transformers.
_COUNTS = ("num_experts", "num_local_experts")


def _read(config: Config) -> dict[str, Any]:
    dense, every = frozenset(config["mlp_only_layers"] or ()), config["decoder_sparse_step"]
    layers = range(config["num_hidden_layers"])
    return {
        "experts.count": next((config[key] for key in _COUNTS if key in config), 128),
        "experts.layer_pattern": tuple(int(layer not in dense and (layer + 1) % every == 0) for layer in layers),
        "experts.router.pre_softmax": not config["norm_topk_prob"],
    }


def _write(options: Config) -> dict[str, Any]:
    return {
        **dict.fromkeys(_COUNTS, options["experts.count"]),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, mixed in enumerate(options["experts.layer_pattern"]) if not mixed],
        "norm_topk_prob": not options["experts.router.pre_softmax"],
    }


QWEN3_MOE = QWEN3._replace(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults={
        **QWEN3.defaults,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "head_dim": None,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    keys={**QWEN3.keys, **MIXTURE, "experts.ffn_size": "moe_intermediate_size"},
    only={**QWEN3.only, "use_sliding_window": (False,)},
    sections=(rope(), Section(_read, _write)),
    tensors={
        **ENDS,
        **ATTENTION,
        **QK_NORMS,
        **MLP,
        **NORMS,
        "layers.{layer}.post_attention_layernorm": Either(("layers.{layer}.mlp.input.norm", "layers.{layer}.moe.norm")),
        "layers.{layer}.mlp.gate": "layers.{layer}.moe.router",
        "layers.{layer}.mlp.experts.{expert}.gate_proj": "layers.{layer}.moe.experts.input.{expert}.gate",
        "layers.{layer}.mlp.experts.{expert}.up_proj": "layers.{layer}.moe.experts.input.{expert}.up",
        "layers.{layer}.mlp.experts.{expert}.down_proj": "layers.{layer}.moe.experts.output.{expert}",
    },
)
