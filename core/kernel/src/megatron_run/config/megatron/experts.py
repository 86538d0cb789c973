"""A mixture of experts in Megatron's arguments, in keys of ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megatron_run.config.megatron.model import Arguments, Setting, given_keys, given_or_default
from megatron_run.errors import InputError

_LONGEST = 500  # characters of a pattern, and layers


def experts(arguments: Arguments) -> Iterator[Setting]:
    """The keys of the section ``model`` that a mixture of experts has; none where there are no experts."""
    given = arguments.get
    if not given("num_experts"):
        return
    yield Setting("model.experts", given("num_experts"), "--num-experts")
    yield from given_keys(arguments, "model", "--moe-")
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
    if given("moe_token_dispatcher_type") in ("allgather", None):
        yield given_or_default(arguments, "model.token_dispatcher", "--moe-token-dispatcher-type", "allgather")


def expert_faults(arguments: Arguments) -> Iterator[tuple[str, str]]:
    """A flag and why it cannot be had here, for what experts ask for."""
    kind = arguments.get("moe_router_load_balancing_type", "aux_loss")
    if arguments.get("num_experts") and kind not in ("aux_loss", "none"):
        yield f"--moe-router-load-balancing-type {kind}", "tokens are spread by aux_loss, or not at all"


def layer_pattern(text: str) -> list[int]:
    """The list that an expression as ``([1]*3+[0]*1)*2`` stands for. Raises :class:`InputError`, executes nothing."""
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
