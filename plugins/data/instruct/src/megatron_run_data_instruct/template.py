"""Chat templates: Jinja in a sandbox, as transformers renders them, and where in the text the responses are.

A template comes with a model from anywhere, so it runs in Jinja's immutable sandbox and sees plain values only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_run.errors import DataError
from megatron_run.safe_folder import parse_json
from megatron_run_engine.data.tokenizer import CHAT_TEMPLATES

#: Around what ``{% generation %}`` marks while a template renders: code points that no text may hold (Unicode 23.7).
BEGIN, END = "\ufdd0", "\ufdd1"
#: The template of a tokenizer without one. The end-of-document token follows the last turn.
PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: "
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}\n{% endgeneration %}"
    "{% else %}{{ message.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)
#: The names of the tokens that templates read.
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TEMPLATE, _CONFIG = CHAT_TEMPLATES
#: What Python raises where a template computes, beside Jinja's own.
_RAISED = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
#: The longest text or list that a product makes, and the most bits of a power.
_LONGEST = 1 << 20
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")


class NoConversation(Exception):
    """What is wrong with a line, or with its messages to the template."""


class _Generation(Extension):
    """The tag ``{% generation %}``, which marks what a model says."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Render the body, between marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


class _Sandbox(ImmutableSandboxedEnvironment):
    """Products and powers are limited: Jinja computes constants while it reads a template, be they of any size."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """``left`` times, or to the power of, ``right``. Raises OverflowError for what would be long."""
        if operator == "**":
            size = left.bit_length() * abs(right) if isinstance(left, int) and isinstance(right, int) else 0
        else:
            sized, count = (left, right) if isinstance(right, int) else (right, left)
            size = len(sized) * count if isinstance(sized, str | list | tuple) and isinstance(count, int) else 0
        if size > _LONGEST:
            raise OverflowError(f"{operator} makes something of length {size}")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """The template ``source``, read from ``path``; ``tokens`` are the special tokens that it may name.

    Raises :class:`DataError` if it is no template.
    """

    def __init__(self, source: str, path: object, tokens: Mapping[str, str]) -> None:
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        self._tokens, self._marks = dict(tokens), bool(_MARKS.search(source))
        self.plain = source == PLAIN
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, *_RAISED) as cause:
            where = f"line {cause.lineno}: " if isinstance(cause, jinja2.TemplateSyntaxError) else ""
            why = where + " ".join(str(cause).split())
            raise DataError(f"the chat template of {path} is broken", why=why, origin="data.template") from cause

    def render(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The text of ``messages``, and the characters of it, from and to, that are responses.

        Where the template marks nothing, a response is what its turn adds to the prompt before it. Raises
        :class:`NoConversation` where the template refuses the messages, or renders a turn otherwise once others follow.
        """
        marked = self._text(messages, prompt=False)
        if self._marks:
            return _without_marks(marked)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:number], prompt=True)
            until = self._text(messages[: number + 1], prompt=False)
            if not (until.startswith(before) and marked.startswith(until)):
                raise NoConversation(
                    f"the template renders message {number} otherwise when others follow; mark what is learned with "
                    "{% generation %} in a template of your own"
                )
            spans.append((len(before), len(until)))
        return marked, spans

    def _text(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=prompt, **self._tokens)
        except (jinja2.TemplateError, *_RAISED) as cause:
            raise NoConversation(f"the chat template refuses it: {' '.join(str(cause).split())}") from cause


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """``text`` without its marks, and what they were around."""
    plain, spans, length = [], [], 0
    for piece in re.split(f"({BEGIN}[^{END}]*{END})", text):
        inner = piece.strip(BEGIN + END)
        if piece.startswith(BEGIN):
            spans.append((length, length + len(inner)))
        plain.append(inner)
        length += len(inner)
    return "".join(plain), spans


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # the names and order that templates use
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as json.dumps writes it: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def find_template(name: str, tokenizer: Path | None) -> ChatTemplate:
    """The template in the file ``name`` or, for ``auto``, the one beside ``tokenizer``, or else :data:`PLAIN`.

    Raises :class:`DataError` if a file cannot be read.
    """
    config = _config(tokenizer)
    tokens = {key: text for key in _TOKENS if (text := _text_of(config.get(key)))}
    if name != "auto":
        path = Path(name).expanduser()
        return ChatTemplate(_read(path), path, tokens)
    if tokenizer is not None and (beside := tokenizer.with_name(_TEMPLATE)).is_file():
        return ChatTemplate(_read(beside), beside, tokens)
    found = config.get("chat_template")
    if isinstance(found, list):  # several, each with a name
        found = next((each.get("template") for each in found if _is_default(each)), None)
    if isinstance(found, str):
        return ChatTemplate(found, tokenizer and tokenizer.with_name(_CONFIG), tokens)
    return ChatTemplate(PLAIN, "this plugin", tokens)


def _config(tokenizer: Path | None) -> dict[str, Any]:
    if tokenizer is None or not (path := tokenizer.with_name(_CONFIG)).is_file():
        return {}
    try:
        found = parse_json(_read(path))
    except ValueError as cause:
        raise DataError(f"{path} is broken", why=str(cause), origin="data.tokenizer") from cause
    return found if isinstance(found, dict) else {}


def _is_default(template: object) -> bool:
    return isinstance(template, dict) and template.get("name") == "default"


def _text_of(token: object) -> str:
    """The text of a special token, which may be kept with options."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        why = getattr(cause, "strerror", None) or "it is not UTF-8"
        raise DataError(f"{path} cannot be read", why=why, origin="data.template") from cause
