"""Reading a launch script without running it: its assignments are followed, its training command is put together.

Quotes are taken off, known variables filled in, sums computed. What only a shell can tell (a command's output, an
argument of the script, a variable from outside) stays as written, ``$1`` or ``$(hostname)``. Branches are not decided:
every assignment is taken in order.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from megatron_run.errors import InputError
from megatron_run.errors.wording import near_path
from megatron_run.files.foreign_file import open_file

#: What a shell would put something else in the place of: a sum, a command's output, a variable.
_DOLLAR = r"""
    \$\(\((?:[^()]|\([^()]*\))*\)\)
  | \$\((?:[^()]|\([^()]*\))*\)
  | \$\{[^{}]*\}
  | \$[A-Za-z_][A-Za-z0-9_]*
"""
#: A piece of a word: quoted, escaped, to be replaced, or one plain character.
_PIECE = rf"""
    '[^']*'
  | "(?:[^"\\]|\\.)*"
  | \\[^\n]
  | {_DOLLAR}
  | `[^`]*`
  | [^\s'"\\`;|&()<>]
"""
_PIECES = re.compile(_PIECE, re.VERBOSE | re.DOTALL)
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
#: Bytes of a script.
MAX_BYTES = 256 * 1024
_TOKEN = re.compile(
    rf"""
    (?P<space>[ \t\r]+|\\\r?\n)
  | (?P<comment>\#[^\n]*)
  | (?P<redirection>(?:\d|&)?[<>]{{1,3}}(?:&\d|[ \t]*[^\s;|&()<>]+)?)
  | (?P<word>(?:{_PIECE})+)
  | (?P<end>[\n;&|]+)
  | (?P<bracket>[()])
    """,
    re.VERBOSE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL | re.ASCII)
#: After these only assignments count; words that may stand before a command; words that make no command.
_DECLARING = {"export", "local", "readonly", "declare", "typeset"}
_BEFORE = {"exec", "time", "!"}
_KEYWORDS = {"if", "then", "else", "elif", "fi", "do", "done", "while", "until", "for", "case", "esac", "{", "}"}
_DECIDING = {"if", "elif", "while", "until", "for", "case"}


class Word(NamedTuple):
    """A word as written, with its quotes, and its line. Brackets outside words are words too."""

    text: str
    line: int


@dataclass
class Script:
    """A launch script: the ``.py`` file of its training command, the words after it, and those before it.

    ``variables`` are what was assigned; ``branches`` the lines where the script decides something, which was not
    followed.
    """

    program: str = ""
    arguments: list[str] = field(default_factory=list)
    launcher: list[str] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    branches: list[int] = field(default_factory=list)


def load_script(path: Path) -> str:
    """The text of the script at ``path``. Raises :class:`InputError` where it cannot be read or is no script."""
    try:
        with open_file(path) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(f"the script {path} cannot be read", why=why, fix=near_path(path)) from None
    if len(content) > MAX_BYTES or b"\0" in content:
        raise InputError(f"{path} is no launch script", why=f"it is binary, or above {MAX_BYTES // 1024} KiB")
    return content.decode("utf-8-sig", errors="replace")


def read_script(text: str, name: str) -> Script:
    """Read the launch script ``text``; ``name`` is the file's, for messages.

    The training command is the last one that starts a ``.py`` file with flags. Raises :class:`InputError` where there
    is none, or where a quote is left open.
    """
    script = Script()
    for statement in _statements(text, name):
        command = _command(statement, script)
        expanded = (each for token in command for each in expand(token.text, script.variables))
        arguments = [part for each in expanded for part in _nested(each)]
        start = next((index for index, argument in enumerate(arguments) if argument.endswith(".py")), len(arguments))
        if any(argument.startswith("--") for argument in arguments[start + 1 :]):
            script.launcher, script.arguments = arguments[:start], arguments[start + 1 :]
            script.program = arguments[start]
    if not script.arguments:
        raise InputError(
            f"{name} starts no training",
            why="no command in it runs a .py file with flags, as: torchrun pretrain_gpt.py --num-layers 12 ...",
        )
    return script


def _statements(text: str, name: str) -> Iterator[list[Word]]:
    """The words of each statement. Inside brackets, as in an array, a line end is white space."""
    statement: list[Word] = []
    position, line, depth = 0, 1, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise InputError(f"{name}:{line}: {text[position]!r} opens what nothing closes")
        if match.lastgroup in ("word", "bracket"):
            statement.append(Word(match[0], line))
            depth += {"(": 1, ")": -1}.get(match[0], 0)
        elif match.lastgroup == "end" and depth <= 0:
            yield statement
            statement, depth = [], 0
        position, line = match.end(), line + match[0].count("\n")
    yield statement


def _command(statement: Sequence[Word], script: Script) -> Sequence[Word]:
    """Follow the assignments at the start of ``statement`` and return the remaining command, without brackets."""
    at, declaring = 0, False
    while at < len(statement):
        text, line = statement[at]
        if text in _DECIDING:
            script.branches.append(line)
        assignment = _ASSIGNMENT.fullmatch(text)
        if assignment:
            at = _assign(assignment, statement, at, script.variables)
        elif declaring or text in _BEFORE or text in _KEYWORDS or text in _DECLARING or text in "()":
            at, declaring = at + 1, declaring or text in _DECLARING
        else:
            break
    return [token for token in statement[at:] if token.text not in "()"]


def _assign(assignment: re.Match[str], statement: Sequence[Word], at: int, variables: dict[str, list[str]]) -> int:
    """Set a variable to the word at ``at``, or to those in brackets after it, and return the place of what follows."""
    name, more, text = assignment.groups()
    before = variables.get(name, []) if more else []
    if not text and [token.text for token in statement[at + 1 : at + 2]] == ["("]:
        places = range(at + 2, len(statement))
        stop = next((place for place in places if statement[place].text == ")"), len(statement))
        tokens = statement[at + 2 : stop]
        variables[name] = before + [each for token in tokens for each in expand(token.text, variables)]
        return stop + 1
    variables[name] = ["".join([*before, *expand(text, variables, split=False)])]
    return at + 1


def _nested(argument: str) -> list[str]:
    """The words of a command inside one word, as in ``bash -c "python pretrain_gpt.py --lr 1"``."""
    if not re.search(r"\.py\s", argument):
        return [argument]
    try:
        return shlex.split(argument)
    except ValueError:  # a quote that is left open: it was part of the text
        return argument.split()


def expand(text: str, variables: Variables, *, split: bool = True) -> list[str]:
    """The words that ``text``, a word as written, expands to. What is unknown stays as written.

    The values of variables outside quotes are split at white space, unless ``split`` is false, as in an assignment.
    Raises :class:`InputError` for variables that repeat each other until they are too long.
    """
    if sum(len(value) for name in _NAME.findall(text) for value in variables.get(name, [])) > _LONGEST:
        raise InputError(f"{text[:40]} stands for above {_LONGEST} characters", why="its variables repeat each other")
    words, any_part = [""], False
    for match in _PIECES.finditer(text):
        piece = match[0]
        parts = _value(piece, variables)
        if split and piece[0] == "$":
            parts = [field for part in parts for field in _SPLIT.findall(part)]
        if parts:
            words[-1] += parts[0]
            words += parts[1:]
            any_part = True
    if not split:
        return [" ".join(words)]
    return words if any_part else []


def is_known(text: str) -> bool:
    """Whether the expanded ``text`` leaves nothing to a shell."""
    return "$" not in text and "`" not in text


def _value(piece: str, variables: Variables) -> list[str]:
    """The value of one piece of a word, before it is split."""
    if piece[0] == "'":
        return [piece[1:-1]]
    if piece[0] == "\\":
        return [piece[1:]]
    if piece[0] == '"':
        return _quoted(piece[1:-1], variables)
    return _referred(piece, variables) if piece[0] == "$" else [piece]


def _quoted(text: str, variables: Variables) -> list[str]:
    """Inside double quotes a variable is one word; ``${ARRAY[@]}`` alone is as many as it has."""
    if text.endswith("[@]}") and (match := _REFERENCE.fullmatch(text)):
        return variables.get(match[1], [text])

    def replaced(match: re.Match[str]) -> str:
        piece = match[0]
        if piece[0] == "$":
            return " ".join(_referred(piece, variables))
        return {"\n": ""}.get(piece[1], piece[1] if piece[1] in '"$`\\' else piece)

    return [_IN_QUOTES.sub(replaced, text)]


def _referred(piece: str, variables: Variables) -> list[str]:
    """The value of ``$NAME``, ``${NAME:-default}`` or ``$((sum))``; the piece itself where it is unknown."""
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
