"""The section ``model`` that Megatron's arguments describe, be they a script's flags or saved in a checkpoint.

Arguments have Megatron's names (``num_attention_heads``); a missing one has Megatron's default.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron_run.errors import InputError
from megatron_run_format_megatron.flags import FLAGS

_ROTATED, _LEARNED = "rope", "learned_absolute"
_LONGEST = 500  # characters of a pattern, and layers
_DISPATCHERS = ("alltoall", "allgather")
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}

Arguments = Mapping[str, Any]


class Setting(NamedTuple):
    """A key, its value, and the reason in a few words: the flag behind it, or Megatron's default."""

    key: str
    value: Any
    why: str


def given_keys(arguments: Arguments, section: str, start: str = "") -> Iterator[Setting]:
    """The keys of ``section`` whose flags are plain: flags that begin with ``start``, else all but those of experts."""
    for flag in FLAGS:
        value = arguments.get(flag.stored)
        meant = flag.name.startswith(start) if start else not flag.name.startswith("--moe-")
        if flag.plain and meant and flag.text.startswith(f"{section}.") and value is not None:
            yield Setting(flag.text, value, flag.name)


def default_of(flag: str) -> str:
    """The reason of a value where ``flag`` was not given."""
    return f"Megatron's default of {flag}"


def given_or_default(arguments: Arguments, key: str, flag: str, default: Any) -> Setting:
    """``key`` with the value of ``flag``, else with Megatron's ``default``."""
    value = arguments.get(flag.removeprefix("--").replace("-", "_"))
    return Setting(key, default, default_of(flag)) if value is None else Setting(key, value, flag)


def network(arguments: Arguments) -> Iterator[Setting]:
    """The keys of the section ``model``, without experts and dropout."""
    given = arguments.get
    yield from given_keys(arguments, "model")
    if given("group_query_attention"):
        yield given_or_default(arguments, "model.num_kv_heads", "--num-query-groups", 1)
    yield from _ffn(arguments)
    if is_rotated(arguments):
        by_type = given("position_embedding_type") == _ROTATED
        why = "--position-embedding-type rope" if by_type else "--use-rotary-position-embeddings"
        yield Setting("model.position", "rope", why)
    norm = _NORMS.get(given("normalization") or "")
    yield Setting("model.norm", norm or "layernorm", "--normalization" if norm else default_of("--normalization"))
    yield _activation(arguments)
    yield _cleared("model.bias", "--disable-bias-linear", cleared=not given("add_bias_linear", True))
    untied = bool(given("untie_embeddings_and_output_weights"))
    yield _cleared("model.tie_embeddings", "--untie-embeddings-and-output-weights", cleared=untied)


def network_faults(arguments: Arguments) -> Iterator[str]:
    """Every reason why this network has no counterpart here, a line each."""
    for flag in FLAGS:
        value = arguments.get(flag.stored)
        if flag.network and flag.differs(value):
            yield f"{flag.name}{'' if value is True else f' {value}'}: {flag.text}"
    given = arguments.get
    position = given("position_embedding_type") or _LEARNED
    if position not in (_LEARNED, _ROTATED):
        yield f"--position-embedding-type {position}: positions are learned, or heads are rotated"
    if given("add_position_embedding", True) is False and not is_rotated(arguments):
        yield "--no-position-embedding: positions are learned, or heads are rotated"
    if given("normalization") not in (None, *_NORMS):
        yield f"--normalization {given('normalization')}: it is LayerNorm or RMSNorm"
    if given("add_qkv_bias") and not given("add_bias_linear", True):
        yield "--add-qkv-bias: all linear layers have biases, or none"
    hidden, heads, channels = given("hidden_size"), given("num_attention_heads"), given("kv_channels")
    if channels and hidden and heads and channels * heads != hidden:
        yield f"--kv-channels {channels}: heads share the hidden size evenly, {hidden} / {heads} each"


def is_rotated(arguments: Arguments) -> bool:
    """Whether positions are rotary; otherwise they are learned."""
    return arguments.get("position_embedding_type") == _ROTATED or bool(arguments.get("use_rotary_position_embeddings"))


def _cleared(key: str, flag: str, *, cleared: bool) -> Setting:
    """A key that is true unless ``flag`` clears it."""
    return Setting(key, not cleared, flag if cleared else f"Megatron's default; {flag} clears it")


def _ffn(arguments: Arguments) -> Iterator[Setting]:
    size, hidden = arguments.get("ffn_hidden_size"), arguments.get("hidden_size")
    if size is not None:
        yield Setting("model.ffn_size", size, "--ffn-hidden-size")
    elif arguments.get("swiglu") and hidden is not None:
        yield Setting(
            "model.ffn_size", hidden * 8 // 3 // 64 * 64, "--swiglu: two thirds of four times the hidden size"
        )


def _activation(arguments: Arguments) -> Setting:
    """The activation. Megatron fuses bias and GeLU by default, and that kernel computes the tanh form."""
    given = arguments.get
    if given("swiglu"):
        return Setting("model.activation", "swiglu", "--swiglu")
    if given("openai_gelu"):
        return Setting("model.activation", "gelu_tanh", "--openai-gelu")
    if given("add_bias_linear", True) and given("bias_gelu_fusion", True):
        return Setting("model.activation", "gelu_tanh", "Megatron's default: what its fused bias and GeLU computes")
    flag = "--no-bias-gelu-fusion" if given("add_bias_linear", True) else "--disable-bias-linear"
    return Setting("model.activation", "gelu", f"{flag}: not fused with a bias")


def experts(arguments: Arguments) -> Iterator[Setting]:
    """The keys of the section ``model`` for a mixture of experts; none for a dense model."""
    given = arguments.get
    if not given("num_experts"):
        return
    yield Setting("model.experts", given("num_experts"), "--num-experts")
    yield from given_keys(arguments, "model", "--moe-")
    yield from _choice(arguments)
    if (kind := given("moe_router_load_balancing_type", "aux_loss")) == "aux_loss":
        yield given_or_default(arguments, "model.aux_loss_coeff", "--moe-aux-loss-coeff", 0.0)
    else:
        yield Setting("model.aux_loss_coeff", 0.0, f"--moe-router-load-balancing-type {kind}")
    # A text in a script, a number or a list in a checkpoint.
    frequency = given_or_default(arguments, "model.expert_layer_freq", "--moe-layer-freq", 1)
    if "[" in str(frequency.value):
        yield Setting("model.expert_layer_pattern", layer_pattern(str(frequency.value)), frequency.why)
    else:
        yield frequency._replace(value=int(frequency.value))
    dispatcher = given_or_default(arguments, "model.token_dispatcher", "--moe-token-dispatcher-type", "allgather")
    if dispatcher.value in _DISPATCHERS:
        yield dispatcher


def _choice(arguments: Arguments) -> Iterator[Setting]:
    """The keys of groups and biases, which decide the choice of experts. A group is worth its share of the choices."""
    given = arguments.get
    if top_groups := given("moe_router_group_topk"):
        yield Setting("model.router_top_groups", top_groups, "--moe-router-group-topk")
        best = int(given("moe_router_topk", 2)) // int(top_groups)
        yield Setting("model.router_group_best", best, "--moe-router-topk / --moe-router-group-topk")
    if given("moe_router_enable_expert_bias"):
        yield given_or_default(arguments, "model.router_bias_rate", "--moe-router-bias-update-rate", 1e-3)


def expert_faults(arguments: Arguments) -> Iterator[tuple[str, str]]:
    """Flags of experts without a counterpart here, each with the reason."""
    kind = arguments.get("moe_router_load_balancing_type", "aux_loss")
    if arguments.get("num_experts") and kind not in ("aux_loss", "none"):
        yield f"--moe-router-load-balancing-type {kind}", "tokens are spread by aux_loss, or not at all"


def dispatcher_faults(arguments: Arguments) -> Iterator[tuple[str, str]]:
    """A dispatcher without a counterpart, which changes nothing of what is learned, with the reason."""
    kind = arguments.get("moe_token_dispatcher_type")
    if arguments.get("num_experts") and kind is not None and kind not in _DISPATCHERS:
        yield f"--moe-token-dispatcher-type {kind}", f"tokens reach experts by {' or '.join(_DISPATCHERS)}"


def layer_pattern(text: str) -> list[int]:
    """The list that an expression as ``([1]*3+[0]*1)*2`` means; nothing is executed. Raises :class:`InputError`."""
    try:
        found = _list(ast.parse(text, mode="eval").body) if len(text) <= _LONGEST else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        found = []
    if not found:
        raise InputError(f"--moe-layer-freq {text[:40]} cannot be read", why="it is a number, or as ([1]*3+[0]*1)*2")
    return found


def _list(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=elements):
            return [_bit(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _list(left) + _list(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int() as times)):
            inner = _list(left)
            if len(inner) * times <= _LONGEST:
                return inner * times
    raise ValueError("this is no list of ones and zeros")


def _bit(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value) if value in (0, 1):
            return value
    raise ValueError("this is neither 0 nor 1")
