"""The keys of attention: heads, positions and windows, and the latents with which the model is ``deepseek``.

Defaults are those of megatron-core's ``TransformerConfig`` and ``MLATransformerConfig``, and of their flags.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from megatron_run_format_megatron.launch_script.settings import (
    Arguments,
    Setting,
    default_of,
    given_or_default,
    layer_pattern,
)

_ROTATED, _LEARNED, _NONE = "rope", "learned_absolute", "none"
#: What Megatron's rotations stretched as in Llama 3 take for granted, and YaRN's.
_LLAMA3_LENGTH, _YARN_LENGTH = 8192, 4096
#: The sizes of latent attention, with Megatron's defaults.
_SIZES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "model.kv_rank": ("--kv-lora-rank", 32),
        "model.nope_head_size": ("--qk-head-dim", 128),
        "model.rope_head_size": ("--qk-pos-emb-head-dim", 64),
        "model.value_head_size": ("--v-head-dim", 128),
    }
)
#: Keys that have one value with latent attention.
FIXED_BY_LATENTS: Mapping[str, object] = MappingProxyType(
    {"model.norm.kind": "rmsnorm", "model.activation": "swiglu", "model.bias": False}
)


def is_latent(arguments: Arguments) -> bool:
    """Whether keys and values come from a latent: the model is ``deepseek``, else ``gpt``."""
    return bool(arguments.get("multi_latent_attention"))


def is_rotated(arguments: Arguments) -> bool:
    """Whether positions are rotary; otherwise they are learned, or there are none."""
    return arguments.get("position_embedding_type") == _ROTATED or bool(arguments.get("use_rotary_position_embeddings"))


def attention(arguments: Arguments) -> Iterator[Setting]:
    """The keys of attention in the section ``model``."""
    if is_latent(arguments):
        yield from _latents(arguments)
        yield from _latent_rotations(arguments)
        return
    given, hidden = arguments.get, arguments.get("hidden_size")
    channels = given("kv_channels")
    if channels and channels * given("num_attention_heads", 0) != hidden:
        yield Setting("model.head_size", channels, "--kv-channels")
    if given("group_query_attention"):
        yield given_or_default(arguments, "model.num_kv_heads", "--num-query-groups", 1)
    if given("add_qkv_bias") and not given("add_bias_linear", True):
        yield Setting("model.attention.qkv_bias", True, "--add-qkv-bias")
    if given("qk_layernorm"):
        yield Setting("model.attention.qk_norm", "head", "--qk-layernorm")
    yield from _windows(arguments)
    yield from _positions(arguments)


def _windows(arguments: Arguments) -> Iterator[Setting]:
    """Megatron counts the tokens before a query, ``model.attention.window`` the query too."""
    left = _left(arguments)
    if left is None:
        return
    yield Setting("model.attention.window", left + 1, "--window-size: so many before it, and itself")
    skipped = arguments.get("window_attn_skip_freq")
    if skipped is not None:
        flag = "--window-attn-skip-freq"
        yield Setting("model.attention.window_pattern", _all_but_each(skipped, flag), flag)


def _left(arguments: Arguments) -> int | None:
    """The tokens before it that a query sees; None for all."""
    left = (arguments.get("window_size") or (-1,))[0]
    return left if left >= 0 else None


def _all_but_each(value: Any, flag: str) -> list[int]:
    """A pattern of ones, with a zero for each n-th layer; or the pattern that ``value`` is."""
    return layer_pattern(value, flag) if "[" in str(value) else [*[1] * (int(value) - 1), 0]


def _positions(arguments: Arguments) -> Iterator[Setting]:
    given = arguments.get
    if not is_rotated(arguments):
        why = _without_positions(arguments)
        if why:
            yield Setting("model.position", "rope", f"{why}: no layer rotates")
            yield Setting("model.rope.pattern", [0], why)
        return
    yield Setting("model.position", "rope", _rotating_flag(arguments))
    if given("rotary_percent", 1) != 1:
        yield Setting("model.rope.fraction", given("rotary_percent"), "--rotary-percent")
    if given("no_rope_freq"):
        skipped = given("no_rope_freq")
        pattern = [1 - bit for bit in layer_pattern(skipped, "--no-rope-freq")] if "[" in str(skipped) else None
        yield Setting("model.rope.pattern", pattern or _all_but_each(skipped, ""), "--no-rope-freq")
    if given("use_rope_scaling"):
        yield Setting("model.rope.scaling", "llama3", "--use-rope-scaling")
        yield given_or_default(arguments, "model.rope.factor", "--rope-scaling-factor", 8.0)
        yield Setting("model.rope.original_length", _LLAMA3_LENGTH, "--use-rope-scaling: Llama 3.1's")
    elif given("rotary_seq_len_interpolation_factor", 1) not in (None, 1):
        flag = "--rotary-seq-len-interpolation-factor"
        yield Setting("model.rope.scaling", "linear", flag)
        yield Setting("model.rope.factor", given("rotary_seq_len_interpolation_factor"), flag)


def _rotating_flag(arguments: Arguments) -> str:
    by_type = arguments.get("position_embedding_type") == _ROTATED
    return "--position-embedding-type rope" if by_type else "--use-rotary-position-embeddings"


def _without_positions(arguments: Arguments) -> str:
    """The flag by which a model that does not rotate has no positions at all; empty where it has learned ones."""
    if arguments.get("position_embedding_type") == _NONE:
        return "--position-embedding-type none"
    return "" if arguments.get("add_position_embedding", True) else "--no-position-embedding"


def _latents(arguments: Arguments) -> Iterator[Setting]:
    for key, (flag, default) in _SIZES.items():
        yield given_or_default(arguments, key, flag, default)
    if arguments.get("q_lora_rank") is not None:
        yield Setting("model.query_rank", arguments["q_lora_rank"], "--q-lora-rank")
    if arguments.get("mtp_num_layers"):
        yield Setting("model.mtp_layers", arguments["mtp_num_layers"], "--mtp-num-layers")
        yield given_or_default(arguments, "model.mtp_loss_coeff", "--mtp-loss-scaling-factor", 0.1)


def _latent_rotations(arguments: Arguments) -> Iterator[Setting]:
    """YaRN with two factors of ``0.1 m ln(factor) + 1``: on rotated features, and squared on all products."""
    factor = arguments.get("rotary_scaling_factor", 1.0)
    rotated, every = arguments.get("mscale", 1.0), arguments.get("mscale_all_dim", 0.0)
    if factor <= 1:
        return
    if arguments.get("rope_type", "yarn") in (None, "yarn"):
        why = "--rotary-scaling-factor"
        yield Setting("model.rope.scaling", "yarn", f"{why}; {default_of('--rope-type')} with latent attention")
        yield Setting("model.rope.factor", factor, why)
        yield Setting("model.rope.original_length", _YARN_LENGTH, f"{why}: megatron-core's length of a first training")
        if (rotated, every) != (1, 0):
            ratio = _stretched(factor, rotated) / _stretched(factor, every)
            yield Setting("model.rope.attention_factor", ratio, _named(arguments, "--mscale", "--mscale-all-dim"))
    if every:
        size = sum(
            given_or_default(arguments, key, *_SIZES[key]).value
            for key in ("model.nope_head_size", "model.rope_head_size")
        )
        scale = _stretched(factor, every) ** 2 / math.sqrt(size)
        yield Setting("model.attention.scale", scale, "--mscale-all-dim, --rotary-scaling-factor")


def _stretched(factor: float, share: float) -> float:
    return 0.1 * share * math.log(factor) + 1


def _named(arguments: Arguments, *flags: str) -> str:
    """Those of ``flags`` that were given."""
    return ", ".join(flag for flag in flags if arguments.get(flag.removeprefix("--").replace("-", "_")) is not None)


def attention_faults(arguments: Arguments) -> Iterator[str]:
    """Every reason why this attention has no counterpart here, a line each."""
    given, latent = arguments.get, is_latent(arguments)
    position = given("position_embedding_type") or _LEARNED
    if latent and not is_rotated(arguments):
        written = f"--position-embedding-type {position}" if given("position_embedding_type") else _LEARNED_BY_DEFAULT
        yield f"{written}: latent attention rotates, and has no other positions"
    elif position not in (_LEARNED, _ROTATED, _NONE):
        yield f"--position-embedding-type {position}: positions are learned, rotary, or there are none"
    if given("rope_type") not in (None, "rope", "yarn" if latent else "rope"):
        yield f"--rope-type {given('rope_type')}: only latent attention stretches rotations so"
    if given("use_rope_scaling") and given("rotary_seq_len_interpolation_factor", 1) not in (None, 1):
        yield "--rotary-seq-len-interpolation-factor: rotations stretch in one way, and --use-rope-scaling was taken"
    right = (given("window_size") or (0, 0))[1]
    if _left(arguments) is not None and right > 0:
        yield f"--window-size with {right} later tokens: a query sees earlier ones alone"
    if given("mtp_num_layers") and not latent:
        yield f"--mtp-num-layers {given('mtp_num_layers')}: model=gpt predicts one token, model=deepseek further ones"
    if latent:
        yield from _latent_faults(arguments)


_LEARNED_BY_DEFAULT = default_of("--position-embedding-type")


def _latent_faults(arguments: Arguments) -> Iterator[str]:
    given = arguments.get
    if not given("qk_layernorm"):
        yield "--multi-latent-attention without --qk-layernorm: latents have norms here"
    if _left(arguments) is not None:
        yield "--window-size: latent attention has no window"
    if given("no_rope_freq"):
        yield "--no-rope-freq: with latent attention every layer rotates"
    for flag in ("--rotary-percent", "--rotary-seq-len-interpolation-factor"):
        value = given(flag.removeprefix("--").replace("-", "_"))
        if value not in (None, 1):
            yield f"{flag} {value}: latent attention rotates all of --qk-pos-emb-head-dim, and stretches as YaRN does"
