"""Small models of every family of Hugging Face, and what the tests prove of each: ``make docs`` shows it as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_run_format_huggingface.families import FAMILIES
from tests.support.small_models import LENGTH

VOCAB = 61
SMALL: Mapping[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "low_freq_factor": 0.5,
    "high_freq_factor": 2.0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "beta_fast": 2.0,
}
#: Six of a head's twelve features stay; read in its first length, and beyond it. Two ranks can share the heads.
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "factor": 4.0,
        "short_factor": [1.0, 1.25, 1.5],
        "long_factor": [2.0, 3.0, 5.0],
    },
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
NO_LOSS = {"router_aux_loss_coef": 0.0}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, **NO_LOSS}
#: Groups of two experts, a shared one, a dense layer first; 24 features and 6 heads of 4 + 6.
DEEPSEEK = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 12,
    "q_lora_rank": 7,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}


class Case(NamedTuple):
    """A family and what its small model has besides :data:`SMALL`; ``needs`` are model options that it must have."""

    family: str
    config: Mapping[str, Any]
    needs: Mapping[str, Any] = {}


#: Each comes in from transformers, computes the same logits and gradients, and goes out bit by bit.
CASES: Mapping[str, Case] = {
    "gpt2": Case("gpt2", {"n_inner": 40, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)}),
    "llama": Case("llama", {}, {"activation": "swiglu"}),
    # transformers' Llama reads no fraction.
    "llama, partial": Case(
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
        {"rope.fraction": 1.0, "rope.theta": 100.0},
    ),
    "llama 3": Case("llama", {"rope_parameters": LLAMA3, "head_dim": 8}, {"rope.scaling": "llama3", "head_size": 8}),
    "llama, stretched": Case(
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}, {"rope.factor": 3.0}
    ),
    "llama, yarn": Case("llama", {"rope_parameters": YARN}, {"rope.scaling": "yarn"}),
    "mistral": Case("mistral", {"sliding_window": 5}, {"attention.window": 5}),
    "qwen2": Case("qwen2", {}, {"attention.qkv_bias": True}),
    "qwen2, windows": Case(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "tie_word_embeddings": True},
        {"attention.window_pattern": (0, 0, 1)},
    ),
    "qwen3": Case("qwen3", {"head_dim": 8}, {"attention.qk_norm": "head", "head_size": 8}),
    "gemma2": Case(
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 3,
        },
        {
            "attention.window_pattern": (1, 0, 1),
            "logits_softcap": 3.0,
            "attention.softcap": 2.0,
            "norm.kind": "rmsnorm_1p",
        },
    ),
    "gemma2, without windows": Case(
        "gemma2",
        {"head_dim": 8, "query_pre_attn_scalar": 3, "layer_types": ["full_attention"] * 3},
        {"attention.window": None},
    ),
    "gemma3": Case(
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        },
        {"rope.window_theta": 30.0, "rope.theta": 100.0, "rope.factor": 2.0, "attention.qk_norm": "head"},
    ),
    "phi3": Case(
        "phi3",
        {"sliding_window": 5, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope.fraction": 0.5},
    ),
    **{
        name: Case("phi3", {**LONGROPE, "original_max_position_embeddings": length}, {"rope.scaling": "longrope"})
        for name, length in {"phi3, long": 8, "phi3, short": LENGTH}.items()
    },
    "olmo2": Case("olmo2", {"rms_norm_eps": 1e-3}, {"attention.qk_norm": "full", "norm.placement": "post"}),
    "gpt_neox": Case("gpt_neox", {"rotary_pct": 0.5}, {"parallel_residual": True, "rope.fraction": 0.5}),
    "gpt_neox, one after the other": Case(
        "gpt_neox",
        {"use_parallel_residual": False, "hidden_act": "gelu_new", "rotary_pct": 1.0},
        {"rope.fraction": 1.0},
    ),
    "starcoder2": Case("starcoder2", {"sliding_window": 5}, {"tie_embeddings": True, "bias": True}),
    "smollm3": Case(
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 4},
        {"rope.pattern": (1, 0, 1), "attention.window_pattern": (0, 1, 0), "tie_embeddings": True},
    ),
    "smollm3, listed": Case(
        "smollm3", {"no_rope_layers": [0, 1, 1, 0], "head_dim": 8}, {"rope.pattern": (0, 1, 1), "head_size": 8}
    ),
    "granite": Case(
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
            "head_dim": 8,
            **dict.fromkeys(("attention_bias", "mlp_bias"), True),
        },
        {"embedding_scale": 3.0, "attention.scale": 0.3, "residual_scale": 0.5, "logits_scale": 0.25, "bias": True},
    ),
    "stablelm": Case(
        "stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}, {"attention.qkv_bias": True, "bias": False}
    ),
    "mixtral": Case("mixtral", {"num_local_experts": 4, **NO_LOSS}, {"experts.count": 4, "experts.top_k": 2}),
    "qwen3 with experts": Case(
        "qwen3_moe",
        {**QWEN_EXPERTS, "head_dim": 8, "mlp_only_layers": [1], "num_experts_per_tok": 3},
        {
            "experts.layer_pattern": (1, 0, 1),
            "experts.router.pre_softmax": True,
            "experts.ffn_size": 20,
            "head_size": 8,
        },
    ),
    "qwen3 with experts, normalised": Case(
        "qwen3_moe",
        {**QWEN_EXPERTS, "head_dim": 4, "norm_topk_prob": True, "decoder_sparse_step": 2},
        {"experts.layer_pattern": (0, 1, 0), "experts.router.pre_softmax": False},
    ),
    "deepseek v3": Case(
        "deepseek_v3",
        {**DEEPSEEK, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
        {"experts.router.groups": 4, "query_rank": 7, "rope.scaling": "yarn", "experts.shared.ffn_size": 40},
    ),
    "deepseek v3, all dense": Case(
        "deepseek_v3",
        {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 3, "v_head_dim": 5},
        {"experts.count": 0, "query_rank": None},
    ),
    "deepseek v3, odd sizes": Case(
        "deepseek_v3",
        {**DEEPSEEK, "qk_nope_head_dim": 5, "v_head_dim": 7},
        {"nope_head_size": 5, "value_head_size": 7},
    ),
    "deepseek v2": Case(
        "deepseek_v2",
        {**DEEPSEEK, "q_lora_rank": None, "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0},
        {"experts.router.group_best": 1, "experts.router.pre_softmax": True, "experts.router.scaling_factor": 3.0},
    ),
    "deepseek v2, greedy": Case("deepseek_v2", {**DEEPSEEK, "topk_method": "greedy"}, {"experts.router.groups": 1}),
}


#: Families whose experts two ranks share by ``parallel.expert``, with the same logits.
EXPERTS_SPLIT = ("mixtral", "qwen3 with experts", "deepseek v3", "deepseek v2")
#: Each computes the same logits on two ranks, by ``parallel.tensor`` and by ``parallel.pipeline``; the others by night.
SPLIT = (
    "gpt2",
    "llama 3",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "gpt_neox",
    "starcoder2",
    "smollm3",
    "granite",
    "stablelm",
    *EXPERTS_SPLIT,
)
#: Those that are computed every time: each family, and two ways to stretch rotary positions. The others differ by keys,
#: which are compared with transformers' for all.
COMPUTED = (*SPLIT, "llama, yarn", "phi3, long", "gemma2, without windows")


def table() -> str:
    """Which of the families are proven to do what, as a table in Markdown with one row for all that are alike."""
    tried, split = {case.family for case in CASES.values()}, {CASES[name].family for name in SPLIT}
    experts = {CASES[name].family for name in EXPERTS_SPLIT}
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in FAMILIES:
        proven = {"import, export, tokenizer": tried, "tensor, pipeline": split, "expert": experts}
        alike.setdefault(tuple(what for what, of in proven.items() if name in of), []).append(f"`{name}`")
    rows = (f"| {', '.join(names)} | {', '.join(proven) or 'nothing'} |" for proven, names in alike.items())
    return "\n".join(["| `model_type` | proven |", "|---|---|", *rows]) + "\n"


#: Of families whose code in transformers rotates all features of a head.
WHOLLY_ROTATED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "smollm3", "granite", "starcoder2")
#: A change of a model of ours, the family that is nearest, and what it is refused for.
BETWEEN = (
    ("llama 3", {"attention.softcap": 5.0}, "llama: model.attention.softcap=5.0 (the family has unset)"),
    *((case, {"rope.fraction": 0.5}, "model.rope.fraction=0.5 (the family has 1.0)") for case in WHOLLY_ROTATED),
    (
        "mistral",
        {"attention.window_pattern": (1, 0, 1)},
        "mistral: model.attention.window_pattern=(1, 0, 1) (the family has (1, 1, 1))",
    ),
    ("qwen3", {"attention.qk_norm": "full"}, "qwen3: model.attention.qk_norm=full (the family has head)"),
    ("gemma2", {"embedding_scale": 2.0}, "gemma2: model.embedding_scale=2.0 (the family has 4.898979485566356)"),
    ("gemma3", {"rope.window_theta": None}, "gemma3_text: model.rope.window_theta=unset (the family has 100.0)"),
    ("phi3", {"rope.scaling": "linear", "rope.factor": 2.0}, "phi3: rope_type='linear' (only 'default' or "),
    ("olmo2", {"norm.placement": "sandwich"}, "olmo2: model.norm.placement=sandwich (the family has post)"),
    ("gpt_neox", {"attention.qkv_bias": False}, "gpt_neox: model.attention.qkv_bias=false (the family has true)"),
    ("smollm3", {"attention.qk_norm": "head"}, "smollm3: model.attention.qk_norm=head (the family has none)"),
    ("granite", {"rope.pattern": (1, 0, 1)}, "granite: model.rope.pattern=(1, 0, 1) (the family has (1, 1, 1))"),
    ("stablelm", {"parallel_residual": True}, "stablelm: model.parallel_residual=true (the family has false)"),
    ("starcoder2", {"residual_scale": 0.5}, "starcoder2: model.residual_scale=0.5 (the family has 1.0)"),
    ("deepseek v3", {"mtp_layers": 1}, "deepseek_v3: model.mtp_layers=1 (the family has 0)"),
    (
        "deepseek v3",
        {"experts.router.bias_rate": 0.0},
        "deepseek_v3: model.experts.router.bias_rate=0.0 (the family has 0.001)",
    ),
    ("deepseek v3", {"experts.shared.ffn_size": 30}, "model.experts.shared.ffn_size=30 (the family has 20)"),
    ("deepseek v2", {"experts.layer_pattern": (0, 1, 0)}, "model.experts.layer_pattern=(0, 1, 0) (the family has"),
)
