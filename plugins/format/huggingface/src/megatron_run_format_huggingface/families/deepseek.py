"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): latent attention and experts beside a shared one, of model=deepseek.

Their features that rotate come last in a head, in pairs; ours first, in halves. The epsilon of their norms of latents
is said by no key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_run_format_huggingface.families.llama import DEFAULTS, ENDS, KEYS, LLAMA, MLP
from megatron_run_format_huggingface.family import Config, Either, Family, Fused, Section
from megatron_run_format_huggingface.sections import rope, rotation

#: The epsilon of the norms of latents, whatever ``rms_norm_eps`` says.
_EPS = 1e-6
#: What balances V3's experts (DeepSeek-AI 2024, "DeepSeek-V3", section 4.2); no key says it.
_BIAS_RATE = 1e-3


def _in_pairs(options: Any) -> list[int]:
    """The features that rotate, from halves to pairs."""
    half = options.rope_head_size // 2
    return [feature for pair in range(half) for feature in (pair, pair + half)]


def _of_head(options: Any) -> Sequence[int]:
    size = options.rope_head_size
    return (*range(size, size + options.nope_head_size), *_in_pairs(options))


def _of_latent(options: Any) -> Sequence[int]:
    return (*range(options.kv_rank), *(options.kv_rank + feature for feature in _in_pairs(options)))


def _query(*, latent: bool) -> Fused:
    """The matrix that makes queries, of a latent or of the stream: theirs has two names."""
    modules = ("layers.{layer}.attention.query.query",)
    return Fused(modules, by_head=True, order=_of_head, when=lambda options: (options.query_rank is not None) == latent)


_ROPE = rope()


def _read_rotations(config: Config) -> dict[str, Any]:
    """With YaRN all products have a factor, too, by the share ``mscale_all_dim``."""
    found = rotation(config.get("rope_scaling") or config.get("rope_parameters") or {})
    options, every = _ROPE.read(config), found.get("mscale_all_dim")
    if found["rope_type"] == "default" or not every:
        return options
    size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return {**options, "attention.scale": (0.1 * every * math.log(found["factor"]) + 1) ** 2 / math.sqrt(size)}


def _write_rotations(options: Config) -> dict[str, Any]:
    found, factor = _ROPE.write(options), options["rope.factor"]
    if options["rope.scaling"] is not None and factor > 1:
        share = (math.sqrt(options["attention.scale"] * math.sqrt(options["head_size"])) - 1) / (0.1 * math.log(factor))
        found["rope_parameters"] = {**found["rope_parameters"], "mscale_all_dim": share}
    return found


def _experts(config: Config) -> dict[str, Any]:
    """The keys that both families have; none where all layers are dense."""
    first = config["first_k_dense_replace"] or 0
    if first >= config["num_hidden_layers"]:
        return {}
    top_k = config["num_experts_per_tok"]  # V2's class has no default
    return ({} if top_k is None else {"experts.top_k": top_k}) | {
        "experts.count": config["n_routed_experts"],
        "experts.ffn_size": config["moe_intermediate_size"],
        "experts.layer_first": first,
        "experts.router.scaling_factor": config["routed_scaling_factor"],
        "experts.shared.ffn_size": config["n_shared_experts"] * config["moe_intermediate_size"],
    }


def _write_experts(options: Config) -> dict[str, Any]:
    if not options["experts.count"]:
        return {"first_k_dense_replace": options["num_layers"]}
    shared, size = options["experts.shared.ffn_size"] or 0, options["experts.ffn_size"]
    return {
        "n_routed_experts": options["experts.count"],
        "num_experts_per_tok": options["experts.top_k"],
        "moe_intermediate_size": size,
        "first_k_dense_replace": options["experts.layer_pattern"].index(1),
        "routed_scaling_factor": options["experts.router.scaling_factor"],
        "n_shared_experts": shared // size,
    }


def _unshared(config: Config) -> list[str]:
    """Reasons of both families."""
    found = [] if config["n_shared_experts"] else ["n_shared_experts=0 (only 1 or more)"]
    found += ["num_experts_per_tok is missing"] if config["num_experts_per_tok"] is None else []
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    if shared not in (None, heads):
        found.append(f"num_key_value_heads={shared} (only as num_attention_heads={heads})")
    if not math.isclose(config["rms_norm_eps"], _EPS):
        found.append(f"rms_norm_eps={config['rms_norm_eps']} (only {_EPS}, which the norms of latents have)")
    return found


def _read_v3(config: Config) -> dict[str, Any]:
    experts = _experts(config)
    return experts and {
        **experts,
        "experts.router.score_function": "sigmoid",
        "experts.router.norm_weights": config["norm_topk_prob"],
        "experts.router.groups": config["n_group"] or 1,
        "experts.router.top_groups": config["topk_group"] or 1,
        "experts.router.bias_rate": _BIAS_RATE,
    }


def _write_v3(options: Config) -> dict[str, Any]:
    return {
        **_write_experts(options),
        "norm_topk_prob": options["experts.router.norm_weights"],
        "n_group": options["experts.router.groups"],
        "topk_group": options["experts.router.top_groups"],
    }


_LIMITED = "group_limited_greedy"


def _read_v2(config: Config) -> dict[str, Any]:
    experts, limited = _experts(config), config["topk_method"] == _LIMITED
    groups = {
        "experts.router.groups": config["n_group"],
        "experts.router.top_groups": config["topk_group"],
        "experts.router.group_best": 1,
    }
    return experts and {**experts, "experts.router.pre_softmax": True, **(groups if limited else {})}


def _write_v2(options: Config) -> dict[str, Any]:
    groups = options["experts.router.groups"]
    return {
        **_write_experts(options),
        "topk_method": _LIMITED if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": options["experts.router.top_groups"],
    }


_LAYER = "layers.{layer}"
_THEIRS, _OURS = f"{_LAYER}.self_attn", f"{_LAYER}.attention"
#: Keys of files older than the classes, with the values that those have for granted.
_OLDER = {"moe_layer_freq": (None, 1), "ep_size": (None, 1)}

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    model="deepseek",
    defaults={
        **DEFAULTS,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "attention_bias": False,
    },
    keys={
        **KEYS,
        "kv_rank": "kv_lora_rank",
        "query_rank": "q_lora_rank",
        "rope_head_size": "qk_rope_head_dim",
        "nope_head_size": "qk_nope_head_dim",
        "value_head_size": "v_head_dim",
    },
    fixed={**LLAMA.fixed, "bias": False, "experts.aux_loss_coeff": 0.0},
    only={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "rope_interleave": (True,),
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
        **_OLDER,
    },
    sections=(
        Section(_read_rotations, _write_rotations, _ROPE.unsupported),
        Section(_read_v3, _write_v3, _unshared),
    ),
    tensors={
        **ENDS,
        **MLP,
        f"{_LAYER}.input_layernorm": f"{_OURS}.norm",
        f"{_LAYER}.post_attention_layernorm": Either((f"{_LAYER}.mlp.input.norm", f"{_LAYER}.moe.norm")),
        f"{_THEIRS}.q_proj": _query(latent=False),
        f"{_THEIRS}.q_a_proj": f"{_OURS}.query_down",
        f"{_THEIRS}.q_a_layernorm": f"{_OURS}.query.norm",
        f"{_THEIRS}.q_b_proj": _query(latent=True),
        f"{_THEIRS}.kv_a_proj_with_mqa": Fused((f"{_OURS}.latent",), order=_of_latent),
        f"{_THEIRS}.kv_a_layernorm": f"{_OURS}.key_value.norm",
        f"{_THEIRS}.kv_b_proj": Fused((f"{_OURS}.key_value.key", f"{_OURS}.key_value.value"), by_head=True),
        f"{_THEIRS}.o_proj": f"{_OURS}.output",
        f"{_LAYER}.mlp.gate": f"{_LAYER}.moe.router",
        f"{_LAYER}.mlp.gate.e_score_correction_bias": f"{_LAYER}.moe.router.expert_bias",
        f"{_LAYER}.mlp.shared_experts.gate_proj": f"{_LAYER}.moe.shared.mlp.input.gate",
        f"{_LAYER}.mlp.shared_experts.up_proj": f"{_LAYER}.moe.shared.mlp.input.up",
        f"{_LAYER}.mlp.shared_experts.down_proj": f"{_LAYER}.moe.shared.mlp.output",
        f"{_LAYER}.mlp.experts.{{expert}}.gate_proj": f"{_LAYER}.moe.experts.input.{{expert}}.gate",
        f"{_LAYER}.mlp.experts.{{expert}}.up_proj": f"{_LAYER}.moe.experts.input.{{expert}}.up",
        f"{_LAYER}.mlp.experts.{{expert}}.down_proj": f"{_LAYER}.moe.experts.output.{{expert}}",
    },
)
DEEPSEEK_V2 = DEEPSEEK_V3._replace(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    defaults={
        **DEEPSEEK_V3.defaults,
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "num_experts_per_tok": None,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
    },
    only={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "norm_topk_prob": (False,),
        "scoring_func": (None, "softmax"),
        "topk_method": ("greedy", _LIMITED),
        **_OLDER,
    },
    sections=(
        Section(_read_rotations, _write_rotations, _ROPE.unsupported),
        Section(_read_v2, _write_v2, _unshared),
    ),
)
