"""Llama (Touvron et al. 2023): rotary positions, root-mean-square norms, SwiGLU, grouped key-value heads.

``transformers`` rotates feature j together with feature j + d/2, as we do, so no row moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_run_format_huggingface.family import HEAD, Config, Family, Row, must_be, needs

if TYPE_CHECKING:
    from megatron_run_engine.formats.gpt_tensors import GptOptions

#: Values in ``transformers`` of keys that ``config.json`` leaves out.
_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "head_dim": None,
}
_THETA = 10000.0
_LINEAR = {
    "self_attn.q_proj": "attention.qkv.query",
    "self_attn.k_proj": "attention.qkv.key",
    "self_attn.v_proj": "attention.qkv.value",
    "self_attn.o_proj": "attention.output",
    "mlp.gate_proj": "mlp.input.gate",
    "mlp.up_proj": "mlp.input.up",
    "mlp.down_proj": "mlp.output",
}
_NORMS = {"input_layernorm": "attention.qkv.norm", "post_attention_layernorm": "mlp.input.norm"}


def _mismatches(options: GptOptions) -> list[str]:
    wanted = {"position": ("rope",), "norm": ("rmsnorm",), "activation": ("swiglu",), "experts": (0,)}
    return needs(options, wanted)


def _config(options: GptOptions, positions: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": options.num_layers,
        "hidden_size": options.hidden_size,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads or options.num_heads,
        "head_dim": options.hidden_size // options.num_heads,
        "intermediate_size": options.ffn_size or 4 * options.hidden_size,
        "max_position_embeddings": positions,
        "vocab_size": options.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": options.norm_eps,
        "rope_theta": options.rope_theta,  # where older versions of transformers look
        "rope_parameters": {"rope_type": "default", "rope_theta": options.rope_theta},
        "attention_bias": options.bias,
        "mlp_bias": options.bias,
        "attention_dropout": options.dropout,
        "initializer_range": options.init_std,
        "tie_word_embeddings": options.tie_embeddings,
    }


def _rope(config: Config) -> dict[str, Any]:
    """Type and base of the rotation, and the numbers of other types. Three places may hold them, by the version."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = said.get("rope_type", said.get("type", "default"))
    return {"rope_theta": config.get("rope_theta", _THETA), **said, "rope_type": kind}


def _unsupported(config: Config) -> list[str]:
    size = config["hidden_size"] // config["num_attention_heads"]
    wanted = {"hidden_act": ("silu",), "mlp_bias": (config["attention_bias"],), "head_dim": (None, size)}
    rope = {"rope_type": ("default",), "partial_rotary_factor": (None, 1, 1.0)}
    return must_be(config, wanted) + must_be(_rope(config), rope)


def _model(config: Config) -> dict[str, Any]:
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"] or config["num_attention_heads"],
        "ffn_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "position": "rope",
        "rope_theta": _rope(config)["rope_theta"],
        "norm": "rmsnorm",
        "norm_eps": config["rms_norm_eps"],
        "activation": "swiglu",
        "bias": config["attention_bias"],
        "tie_embeddings": config["tie_word_embeddings"],
        "dropout": 0.0,
        "init_std": config["initializer_range"],
    }


def _rows(options: GptOptions) -> list[Row]:
    rows = [Row("embed_tokens.weight", ("embedding.word.weight",)), Row("norm.weight", ("final_norm.weight",))]
    parts = ("weight", "bias") if options.bias else ("weight",)
    for layer in range(options.num_layers):
        theirs, ours = f"layers.{layer}", f"layers.{layer}"
        rows += [Row(f"{theirs}.{name}.weight", (f"{ours}.{norm}.weight",)) for name, norm in _NORMS.items()]
        rows += [
            Row(f"{theirs}.{name}.{part}", (f"{ours}.{matrix}.{part}",))
            for name, matrix in _LINEAR.items()
            for part in parts
        ]
    return rows if options.tie_embeddings else [*rows, Row(HEAD, ("output.weight",))]


def _notes(config: Config) -> list[str]:
    rate = config["attention_dropout"]
    return (
        [f"attention_dropout={rate} was left out: model.dropout, here 0.0, acts on more than attention"] if rate else []
    )


LLAMA = Family(
    model_type="llama",
    prefix="model.",
    defaults=_DEFAULTS,
    mismatches=_mismatches,
    config=_config,
    unsupported=_unsupported,
    model=_model,
    positions="max_position_embeddings",
    rows=_rows,
    notes=_notes,
)
