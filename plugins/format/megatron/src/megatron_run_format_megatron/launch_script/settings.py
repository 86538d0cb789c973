"""The parts of every section: a key with its value and reason, from Megatron's arguments.

Arguments have Megatron's names (``num_attention_heads``); a missing one has Megatron's default.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron_run.errors import InputError
from megatron_run_format_megatron.launch_script.flags import FLAGS

_LONGEST = 500  # characters of a pattern, and layers

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


def layer_pattern(value: Any, flag: str) -> list[int]:
    """The list that an expression as ``([1]*3+[0]*1)*2`` means, or the list of a checkpoint; nothing is executed.

    Raises :class:`InputError` that names ``flag``.
    """
    text = str(value)
    try:
        found = _list(ast.parse(text, mode="eval").body) if len(text) <= _LONGEST else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        found = []
    if not found:
        raise InputError(f"{flag} {text[:40]} cannot be read", why="it is a number, or as ([1]*3+[0]*1)*2")
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
