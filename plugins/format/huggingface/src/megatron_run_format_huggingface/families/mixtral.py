"""Mixtral (Jiang et al. 2024): Mistral with experts in every layer, weighted by a softmax over the chosen ones."""

from __future__ import annotations

from megatron_run_format_huggingface.families.llama import ATTENTION, ENDS
from megatron_run_format_huggingface.families.mistral import MISTRAL
from megatron_run_format_huggingface.sections import rope

#: Keys of a mixture. Their loss is a mean over layers and ``top_k`` times ours, but a coefficient changes no logit.
MIXTURE = {"experts.top_k": "num_experts_per_tok", "experts.aux_loss_coeff": "router_aux_loss_coef"}

MIXTRAL = MISTRAL._replace(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults={
        **MISTRAL.defaults,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
    },
    keys={**MISTRAL.keys, **MIXTURE, "experts.count": "num_local_experts"},
    only={**MISTRAL.only, "router_jitter_noise": (0.0,)},
    sections=(rope(1e6),),
    tensors={
        **ENDS,
        **ATTENTION,
        "layers.{layer}.input_layernorm": "layers.{layer}.attention.qkv.norm",
        "layers.{layer}.post_attention_layernorm": "layers.{layer}.moe.norm",
        "layers.{layer}.block_sparse_moe.gate": "layers.{layer}.moe.router",
        "layers.{layer}.block_sparse_moe.experts.{expert}.w1": "layers.{layer}.moe.experts.input.{expert}.gate",
        "layers.{layer}.block_sparse_moe.experts.{expert}.w3": "layers.{layer}.moe.experts.input.{expert}.up",
        "layers.{layer}.block_sparse_moe.experts.{expert}.w2": "layers.{layer}.moe.experts.output.{expert}",
    },
)
