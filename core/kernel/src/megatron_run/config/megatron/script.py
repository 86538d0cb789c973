"""Reading a launch script without running it: its assignments are followed, its training command is put together.

What only a shell could say (a command's output, an argument of the script, a variable from outside) stays as it is
written, ``$1`` or ``$(hostname)``. Branches are not decided: every assignment is taken in order.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megatron_run.config.megatron.words import PIECE, expand
from megatron_run.errors import InputError

#: Bytes of a script.
MAX_BYTES = 256 * 1024
_TOKEN = re.compile(
    rf"""
    (?P<space>[ \t\r]+|\\\r?\n)
  | (?P<comment>\#[^\n]*)
  | (?P<redirection>(?:\d|&)?[<>]{{1,3}}(?:&\d|[ \t]*[^\s;|&()<>]+)?)
  | (?P<word>(?:{PIECE})+)
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
    """A word as it is written, quotes and all, and its line. Brackets outside words are words too."""

    text: str
    line: int


@dataclass
class Script:
    """What a launch script says: the words after the ``.py`` file of its training command, and those before it.

    ``variables`` are what was assigned; ``branches`` the lines where the script decides something, which was not
    followed.
    """

    arguments: list[str] = field(default_factory=list)
    launcher: list[str] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    branches: list[int] = field(default_factory=list)


def load_script(path: Path) -> str:
    """The text of the script at ``path``. Raises :class:`InputError` where it cannot be read or is no script."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"the script {path} cannot be read", why=error.strerror or str(error)) from None
    if len(content) > MAX_BYTES or b"\0" in content:
        raise InputError(f"{path} is no launch script", why=f"it is binary, or above {MAX_BYTES // 1024} KiB")
    return content.decode("utf-8", errors="replace")


def read_script(text: str, name: str) -> Script:
    """Read the launch script ``text``; ``name`` is the file's, for messages.

    The training command is the last one that starts a ``.py`` file with flags. Raises :class:`InputError` where there
    is none, or where a quote is left open.
    """
    script = Script()
    for statement in _statements(text, name):
        command = _command(statement, script)
        words = [part for word in command for each in expand(word.text, script.variables) for part in _nested(each)]
        start = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words))
        if any(word.startswith("--") for word in words[start + 1 :]):
            script.launcher, script.arguments = words[:start], words[start + 1 :]
    if not script.arguments:
        raise InputError(
            f"{name} starts no training",
            why="no command in it runs a .py file with flags, as: torchrun pretrain_gpt.py --num-layers 12 ...",
        )
    return script


def _statements(text: str, name: str) -> Iterator[list[Word]]:
    """The words of each statement. Inside brackets, as in an array, the end of a line ends nothing."""
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
    """Follow the assignments with which ``statement`` starts; the command that is left, without brackets."""
    rest, declaring = statement, False
    while rest:
        text, line = rest[0]
        if text in _DECIDING:
            script.branches.append(line)
        assignment = _ASSIGNMENT.fullmatch(text)
        if assignment:
            rest = _assign(assignment, rest, script.variables)
        elif declaring or text in _BEFORE or text in _KEYWORDS or text in _DECLARING or text in "()":
            rest, declaring = rest[1:], declaring or text in _DECLARING
        else:
            break
    return [word for word in rest if word.text not in "()"]


def _assign(assignment: re.Match[str], rest: Sequence[Word], variables: dict[str, list[str]]) -> Sequence[Word]:
    """Set a variable to a word, or to the words in brackets; what comes after them."""
    name, more, text = assignment.groups()
    before = variables.get(name, []) if more else []
    texts = [word.text for word in rest]
    if not text and texts[1:2] == ["("]:
        stop = texts.index(")") if ")" in texts else len(texts)
        variables[name] = before + [word for each in texts[2:stop] for word in expand(each, variables)]
        return rest[stop + 1 :]
    variables[name] = ["".join([*before, *expand(text, variables, split=False)])]
    return rest[1:]


def _nested(word: str) -> list[str]:
    """A whole command in one word, as in ``bash -c "python pretrain_gpt.py --lr 1"``, is taken apart."""
    if not re.search(r"\.py\s", word):
        return [word]
    try:
        return shlex.split(word)
    except ValueError:  # a quote that is left open: it was part of the text
        return word.split()
