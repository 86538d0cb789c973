"""GPT-2 (Radford et al. 2019): learned positions, layer norms, GeLU, biases everywhere."""

from __future__ import annotations

from megatron_run_format_huggingface.family import Family, Fused
from megatron_run_format_huggingface.sections import activation

#: Values in ``transformers`` of keys that ``config.json`` leaves out.
_DEFAULTS = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_QKV = tuple(f"layers.{{layer}}.attention.qkv.{name}" for name in ("query", "key", "value"))

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    defaults=_DEFAULTS,
    keys={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_heads": "n_head",
        "ffn_size": "n_inner",
        "vocab_size": "vocab_size",
        "norm.eps": "layer_norm_epsilon",
        "init_std": "initializer_range",
        "tie_embeddings": "tie_word_embeddings",
    },
    fixed={"position": "learned", "norm.kind": "layernorm", "bias": True},
    only={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    sections=(
        activation("activation_function", {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}),
    ),
    tensors={
        "wte": "embedding.word",
        "wpe": "embedding.position",
        "ln_f": "final_norm",
        "lm_head": "output",
        "h.{layer}.ln_1": "layers.{layer}.attention.qkv.norm",
        "h.{layer}.ln_2": "layers.{layer}.mlp.input.norm",
        "h.{layer}.attn.c_attn": Fused(_QKV, transposed=True),
        "h.{layer}.attn.c_proj": Fused(("layers.{layer}.attention.output",), transposed=True),
        "h.{layer}.mlp.c_fc": Fused(("layers.{layer}.mlp.input.up",), transposed=True),
        "h.{layer}.mlp.c_proj": Fused(("layers.{layer}.mlp.output",), transposed=True),
    },
    dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    positions="n_positions",
    prefix="transformer.",
)
