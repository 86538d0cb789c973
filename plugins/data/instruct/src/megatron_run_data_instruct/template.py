"""Chat templates: Jinja in a sandbox, as transformers renders them, and where in the text the responses are.

A template comes with a model from anywhere, so it runs in Jinja's immutable sandbox, sees plain values only, and has
limits of time and memory (``renderer``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron_run.errors import DataError
from megatron_run.safe_folder import parse_json
from megatron_run_data_instruct.renderer import BEGIN, END, Broken, Refused, Renderer, compiled, rendered
from megatron_run_engine.data.tokenizer import CHAT_TEMPLATES
from megatron_run_engine.data.user_files import read_text, unreadable

#: The template of a tokenizer without one. The end-of-document token follows the last turn.
PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: "
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}\n{% endgeneration %}"
    "{% else %}{{ message.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)
#: The names of the tokens that templates read.
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TEMPLATE, _CONFIG = CHAT_TEMPLATES
#: The most bytes of a template or a ``tokenizer_config.json``.
_LARGEST = 1 << 26
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")


class NoConversation(Exception):
    """What is wrong with a line, or with its messages to the template."""


class ChatTemplate:
    """The template ``source``, read from ``path``; ``tokens`` are the special tokens that it may name.

    ``date`` is what it reads as today, None for the day of its rendering. ``unopened`` is what its prompt for an answer
    ends with where an answer does not begin with it, such as the opening of a thought; empty until one was rendered.
    Raises :class:`DataError` if it is no template.
    """

    def __init__(self, source: str, path: object, tokens: Mapping[str, str], date: str | None = None) -> None:
        self._path, self._tokens, self._marks = path, dict(tokens), bool(_MARKS.search(source))
        self.plain = source == PLAIN  # ours: it needs no process of its own
        with self._broken():
            self._render = partial(rendered, compiled(source)) if self.plain else Renderer(source, date=date).render
        self.unopened = ""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The text of ``messages``, and the characters of it, from and to, that are responses.

        Where the template marks nothing, a response is what its turn adds to the prompt before it. Of a prompt that
        opens a thought, it adds to what both begin with. Raises :class:`NoConversation` where the template refuses the
        messages, or renders a turn otherwise once others follow.
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
            start = self._start(messages[:number], before, until)
            if start is None or not marked.startswith(until):
                raise NoConversation(
                    f"the template renders message {number} otherwise when others follow; mark what is learned with "
                    "{% generation %} in a template of your own"
                )
            spans.append((start, len(until)))
        return marked, spans

    def _start(self, earlier: Sequence[Mapping[str, Any]], before: str, until: str) -> int | None:
        """Where in ``until`` the answer to ``before`` starts; None where ``until`` does not go on from that prompt."""
        if until.startswith(before):
            return len(before)
        both = next(
            (place for place, pair in enumerate(zip(before, until, strict=False)) if pair[0] != pair[1]), len(until)
        )
        if not earlier or both <= len(self._text(earlier, prompt=False)):
            return None
        self.unopened = before[both:]
        return both

    def _text(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        variables = {**self._tokens, "messages": list(messages), "add_generation_prompt": prompt}
        try:
            with self._broken():
                return self._render(variables)
        except Refused as cause:
            raise NoConversation(f"the chat template refuses it: {cause}") from cause

    @contextmanager
    def _broken(self) -> Iterator[None]:
        try:
            yield
        except Broken as cause:
            what = f"the chat template of {self._path} is broken"
            raise DataError(what, why=str(cause), origin="data.template") from cause


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


def find_template(name: str, tokenizer: Path | None, date: str | None = None) -> ChatTemplate:
    """The template in the file ``name`` or, for ``auto``, the one beside ``tokenizer``, or else :data:`PLAIN`.

    ``date`` is what it reads as today. Raises :class:`DataError` if a file cannot be read.
    """
    config = _config(tokenizer)
    tokens = {key: text for key in _TOKENS if (text := _text_of(config.get(key)))}
    if name != "auto":
        path = Path(name).expanduser()
        return ChatTemplate(_read(path), path, tokens, date)
    if tokenizer is not None and (beside := tokenizer.with_name(_TEMPLATE)).is_file():
        return ChatTemplate(_read(beside), beside, tokens, date)
    found = config.get("chat_template")
    if isinstance(found, list):  # several, each with a name
        found = next((each.get("template") for each in found if _is_default(each)), None)
    if isinstance(found, str):
        return ChatTemplate(found, tokenizer and tokenizer.with_name(_CONFIG), tokens, date)
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
        large = path.stat().st_size > _LARGEST
    except OSError as cause:
        raise unreadable(path, cause, "data.template") from cause
    if large:
        raise DataError(f"{path} is too large", why=f"more than {_LARGEST >> 20} MiB", origin="data.template")
    return read_text(path, "data.template")
