"""GPT-2 (Radford et al. 2019): learned positions, layer norms, GeLU, biases everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_run_format_huggingface.family import HEAD, Config, Family, Row, must_be, needs

if TYPE_CHECKING:
    from megatron_run_engine.formats.gpt_tensors import GptOptions

#: Our activations by their names. ``gelu_new`` is the approximation by tanh.
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
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


def _mismatches(options: GptOptions) -> list[str]:
    wanted = {
        "position": ("learned",),
        "norm": ("layernorm",),
        "activation": ("gelu", "gelu_tanh"),
        "bias": (True,),
        "num_kv_heads": (None, options.num_heads),
        "experts": (0,),
    }
    return needs(options, wanted)


def _config(options: GptOptions, positions: int) -> dict[str, Any]:
    theirs = {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": options.num_layers,
        "n_embd": options.hidden_size,
        "n_head": options.num_heads,
        "n_inner": options.ffn_size,
        "n_positions": positions,
        "vocab_size": options.vocab_size,
        "activation_function": theirs[options.activation],
        "layer_norm_epsilon": options.norm_eps,
        **dict.fromkeys(_DROPOUTS, options.dropout),
        "initializer_range": options.init_std,
        "tie_word_embeddings": options.tie_embeddings,
    }


def _unsupported(config: Config) -> list[str]:
    wanted = {
        "activation_function": tuple(_ACTIVATIONS),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    return must_be(config, wanted)


def _model(config: Config) -> dict[str, Any]:
    return {
        "num_layers": config["n_layer"],
        "hidden_size": config["n_embd"],
        "num_heads": config["n_head"],
        "num_kv_heads": config["n_head"],
        "ffn_size": config["n_inner"] or 4 * config["n_embd"],
        "vocab_size": config["vocab_size"],
        "position": "learned",
        "norm": "layernorm",
        "norm_eps": config["layer_norm_epsilon"],
        "activation": _ACTIVATIONS[config["activation_function"]],
        "bias": True,
        "tie_embeddings": config["tie_word_embeddings"],
        "dropout": config["resid_pdrop"],
        "init_std": config["initializer_range"],
    }


def _rows(options: GptOptions) -> list[Row]:
    rows = [
        Row("wte.weight", ("embedding.word.weight",)),
        Row("wpe.weight", ("embedding.position.weight",)),
        Row("ln_f.weight", ("final_norm.weight",)),
        Row("ln_f.bias", ("final_norm.bias",)),
    ]
    for layer in range(options.num_layers):
        rows += _layer_rows(f"h.{layer}", f"layers.{layer}")
    return rows if options.tie_embeddings else [*rows, Row(HEAD, ("output.weight",))]


def _layer_rows(theirs: str, ours: str) -> list[Row]:
    qkv = [f"{ours}.attention.qkv.{name}" for name in ("query", "key", "value")]
    matrices = {
        "attn.c_attn": qkv,
        "attn.c_proj": [f"{ours}.attention.output"],
        "mlp.c_fc": [f"{ours}.mlp.input.up"],
        "mlp.c_proj": [f"{ours}.mlp.output"],
    }
    norms = {"ln_1": f"{ours}.attention.qkv.norm", "ln_2": f"{ours}.mlp.input.norm"}
    rows = [Row(f"{theirs}.{name}.{part}", (f"{norm}.{part}",)) for name, norm in norms.items() for part in _PARTS]
    for name, parts in matrices.items():
        rows.append(Row(f"{theirs}.{name}.weight", tuple(f"{part}.weight" for part in parts), transposed=True))
        rows.append(Row(f"{theirs}.{name}.bias", tuple(f"{part}.bias" for part in parts)))
    return rows


_PARTS = ("weight", "bias")


def _notes(config: Config) -> list[str]:
    rates = {key: config[key] for key in _DROPOUTS}
    if len(set(rates.values())) == 1:
        return []
    said = ", ".join(f"{key}={rate}" for key, rate in rates.items())
    return [f"the source has {said}, and model.dropout is one rate: {config['resid_pdrop']} was taken"]


GPT2 = Family(
    model_type="gpt2",
    prefix="transformer.",
    defaults=_DEFAULTS,
    mismatches=_mismatches,
    config=_config,
    unsupported=_unsupported,
    model=_model,
    positions="n_positions",
    rows=_rows,
    notes=_notes,
)
