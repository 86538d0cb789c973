"""What the words of a shell script become: quotes are taken off, known variables filled in, sums computed."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from megatron_run.errors import InputError

#: What a shell would put something else in the place of: a sum, a command's output, a variable.
_DOLLAR = r"""
    \$\(\((?:[^()]|\([^()]*\))*\)\)
  | \$\((?:[^()]|\([^()]*\))*\)
  | \$\{[^{}]*\}
  | \$[A-Za-z_][A-Za-z0-9_]*
"""
#: A piece of a word: quoted, escaped, to be replaced, or one plain character.
PIECE = rf"""
    '[^']*'
  | "(?:[^"\\]|\\.)*"
  | \\[^\n]
  | {_DOLLAR}
  | `[^`]*`
  | [^\s'"\\`;|&()<>]
"""
_PIECES = re.compile(PIECE, re.VERBOSE | re.DOTALL)
_IN_QUOTES = re.compile(rf"\\. | {_DOLLAR}", re.VERBOSE | re.DOTALL)
_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*|\d+)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}|([A-Za-z_]\w*))", re.ASCII)
#: Words at white space; what waits for a shell is not cut.
_SPLIT = re.compile(rf"(?: {_DOLLAR} | `[^`]*` | \S )+", re.VERBOSE | re.DOTALL)
_SUM = re.compile(r"\$\(\((.*)\)\)", re.DOTALL)
_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)", re.ASCII)
_LONGEST, _LONGEST_SUM = 1 << 20, 200  # characters
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.floordiv,
        ast.Mod: operator.mod,
    }
)

#: A variable's words: one, or those of an array.
Variables = Mapping[str, list[str]]


def expand(text: str, variables: Variables, *, split: bool = True) -> list[str]:
    """The words that ``text``, a word as it is written, becomes. What is not known stays as it is written.

    The values of variables outside quotes are split at white space, unless ``split`` is false, as in an assignment.
    Raises :class:`InputError` for variables that double each other until they are too long.
    """
    if sum(len(word) for name in _NAME.findall(text) for word in variables.get(name, [])) > _LONGEST:
        raise InputError(f"{text[:40]} stands for above {_LONGEST} characters", why="its variables repeat each other")
    words, any_part = [""], False
    for match in _PIECES.finditer(text):
        piece = match[0]
        parts = _value(piece, variables)
        if split and piece[0] == "$":
            parts = [word for part in parts for word in _SPLIT.findall(part)]
        if parts:
            words[-1] += parts[0]
            words += parts[1:]
            any_part = True
    if not split:
        return [" ".join(words)]
    return words if any_part else []


def is_known(text: str) -> bool:
    """Whether nothing in ``text``, once expanded, waits for a shell."""
    return "$" not in text and "`" not in text


def _value(piece: str, variables: Variables) -> list[str]:
    """What one piece of a word stands for, before it is split."""
    if piece[0] == "'":
        return [piece[1:-1]]
    if piece[0] == "\\":
        return [piece[1:]]
    if piece[0] == '"':
        return _quoted(piece[1:-1], variables)
    return _referred(piece, variables) if piece[0] == "$" else [piece]


def _quoted(text: str, variables: Variables) -> list[str]:
    """Inside double quotes a variable is one word, but ``${ARRAY[@]}`` alone its words."""
    if text.endswith("[@]}") and (match := _REFERENCE.fullmatch(text)):
        return variables.get(match[1], [text])

    def replaced(match: re.Match[str]) -> str:
        piece = match[0]
        if piece[0] == "$":
            return " ".join(_referred(piece, variables))
        return {"\n": ""}.get(piece[1], piece[1] if piece[1] in '"$`\\' else piece)

    return [_IN_QUOTES.sub(replaced, text)]


def _referred(piece: str, variables: Variables) -> list[str]:
    """The value of ``$NAME``, ``${NAME:-default}`` or ``$((sum))``; the piece itself where that is not known."""
    if match := _SUM.fullmatch(piece):
        number = compute(match[1], variables)
        return [piece if number is None else str(number)]
    match = _REFERENCE.fullmatch(piece)
    if match is None:
        return [piece]
    known = variables.get(match[1] or match[3])
    if known is None and match[2] is not None:
        return _quoted(match[2].strip("\"'"), variables)
    return [piece] if known is None else known


def compute(text: str, variables: Variables) -> int | None:
    """The value of a sum of integers and variables (``$N * (M + 1)``), None for anything else. Nothing is executed."""
    plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text).strip()
    if len(plain) > _LONGEST_SUM:
        return None
    try:
        return _number(ast.parse(plain, mode="eval").body, variables)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr, variables: Variables) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return int(" ".join(variables.get(name, [])))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, variables)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_number(left, variables), _number(right, variables))
    raise ValueError("this is no sum of integers")
