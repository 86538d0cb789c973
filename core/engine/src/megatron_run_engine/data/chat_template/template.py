"""Chat templates: Jinja in a sandbox, as transformers renders them, and where in the text the responses are.

A template comes with a model from anywhere, so it runs in Jinja's immutable sandbox, sees plain values only, and has
limits of time and memory (``renderer``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.errors import DataError
from megatron_run_engine.data.chat_template.chat_messages import NoConversation, check_roles
from megatron_run_engine.data.chat_template.renderer import (
    BEGIN,
    END,
    Broken,
    Refused,
    Renderer,
    compiled,
    rendered,
)
from megatron_run_engine.data.tokenizer_folder.record import AUTO
from megatron_run_engine.data.user_files import read_text, unreadable

if TYPE_CHECKING:
    from megatron_run_engine.data.tokenizer_base import Tokenizer

#: The template of a tokenizer without one. The end-of-document token follows the last turn.
PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: "
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}\n{% endgeneration %}"
    "{% else %}{{ message.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)
#: Texts of an answer and of a user that no conversation holds: they are no characters (Unicode 23.7).
_ANSWER, _NEXT = "\ufdd2", "\ufdd3"
#: The most bytes of a template.
_LARGEST = 1 << 26
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")


class ChatTemplate:
    """The template ``source``, read from ``path``; ``tokens`` are the special tokens that it may name.

    ``date`` is what it reads as today, None for the day of its rendering. ``unopened`` is what its prompt for an answer
    ends with where an answer does not begin with it, such as the opening of a thought; empty until one was rendered.
    Raises :class:`DataError` if it is no template.
    """

    def __init__(self, source: str, path: object, tokens: Mapping[str, str], date: str | None = None) -> None:
        self._path, self._tokens, self._marks = path, dict(tokens), bool(_MARKS.search(source))
        self.plain = source == PLAIN  # ours: it needs no process of its own
        self._roles: frozenset[str] = frozenset()
        with self._broken():
            if self.plain:
                self._render: Callable[[Mapping[str, Any]], str] = partial(rendered, compiled(source))
            else:
                renderer = Renderer(source, date=date)
                self._render, self._roles = renderer.render, renderer.roles
        self.unopened = ""

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of ``messages``, and the characters of it, from and to, that are responses.

        ``tools`` are those that the model may call, as JSON schemas. Where the template marks nothing, a response
        is what its turn adds to the prompt before it. Of a prompt that opens a thought, it adds to what both begin
        with. Raises :class:`NoConversation` where the template refuses the
        messages, or renders a turn otherwise once others follow.
        """
        marked = self._text(messages, tools, prompt=False)
        if self._marks:
            return _without_marks(marked)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:number], tools, prompt=True)
            until = self._begun(messages[: number + 1], tools, marked)
            start = None if until is None else self._start(messages[:number], tools, before, until)
            if until is None or start is None:
                raise NoConversation(
                    f"the template renders message {number} otherwise when others follow; mark what is learned with "
                    "{% generation %} in a template of your own"
                )
            spans.append((start, len(until)))
        return marked, spans

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The text of ``messages``, and of what begins an answer to them. Raises :class:`NoConversation`."""
        return _without_marks(self._text(messages, tools, prompt=True))[0]

    def after_answer(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The text between an answer to ``messages`` and the user's next words; empty where it cannot be seen."""
        later = [{"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
        try:
            text = _without_marks(self._text([*messages, *later], tools, prompt=False))[0]
        except NoConversation:
            return ""
        _, answered, rest = text.rpartition(_ANSWER)
        between, asked, _ = rest.partition(_NEXT)
        return between if answered and asked else ""

    def _start(
        self,
        earlier: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        before: str,
        until: str,
    ) -> int | None:
        """Where in ``until`` the answer to ``before`` starts; None where ``until`` does not go on from that prompt."""
        if until.startswith(before):
            return len(before)
        both = next(
            (place for place, pair in enumerate(zip(before, until, strict=False)) if pair[0] != pair[1]), len(until)
        )
        begun = self._begun(earlier, tools, until) if earlier else None
        if begun is None or both <= len(begun):
            return None
        self.unopened = before[both:]
        return both

    def _begun(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, whole: str
    ) -> str | None:
        """The text of ``messages``, with which ``whole`` begins; None where it begins otherwise.

        A template may end a conversation with a special token, as Phi-3's does, which is not there where others follow.
        """
        text = self._text(messages, tools, prompt=False)
        ways = (text, *(text.removesuffix(token) for token in self._tokens.values() if token))
        return next((way for way in ways if whole.startswith(way)), None)

    def _text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, prompt: bool
    ) -> str:
        check_roles(messages, self._roles)
        variables = given_to_template(messages, tools, self._tokens, prompt=prompt)
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


def given_to_template(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    tokens: Mapping[str, str],
    *,
    prompt: bool,
) -> dict[str, Any]:
    """The variables with which transformers renders a template; ``prompt`` asks for what begins an answer."""
    read = [_as_templates_read(message) for message in messages]
    return {**tokens, "messages": read, "tools": tools, "documents": None, "add_generation_prompt": prompt}


#: Names under which messages carry a model's thoughts; templates read the first one.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def _as_templates_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """``message`` as transformers hands it to a template: without keys of no value, and thoughts by each name."""
    kept = {key: value for key, value in message.items() if value is not None}
    thoughts = next((kept[name] for name in _THOUGHTS if name in kept), None)
    return kept if thoughts is None else {"thinking": thoughts, **kept, "reasoning_content": thoughts}


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


class Templates:
    """The templates for conversations, as :func:`template_source` finds them; ``place`` is the tokenizer's.

    A tokenizer may come with another one for conversations with tools. ``date`` is what they read as today. Raises
    :class:`DataError` if a file cannot be read.
    """

    def __init__(self, name: str, tokenizer: Tokenizer, place: object, date: str | None = None) -> None:
        path = place if name == AUTO else Path(name).expanduser()
        sources = {tools: template_source(name, tokenizer, tools=tools) for tools in (False, True)}
        made = {source: ChatTemplate(source, path, tokenizer.special, date) for source in set(sources.values())}
        self._of = {tools: made[source] for tools, source in sources.items()}

    @property
    def unopened(self) -> list[str]:
        """The ends of prompts for an answer that answers lack, so far (:class:`ChatTemplate`)."""
        return list(dict.fromkeys(each.unopened for each in self._of.values() if each.unopened))

    def of(self, *, tools: bool) -> ChatTemplate:
        """The one that renders conversations with ``tools``, or without."""
        return self._of[tools]


def template_source(name: str, tokenizer: Tokenizer, *, tools: bool) -> str:
    """The template ``name`` for conversations with ``tools`` or without.

    It is a file or, for ``auto``, what comes with the tokenizer, else :data:`PLAIN`. Raises :class:`DataError` if the
    file cannot be read.
    """
    if name != AUTO:
        return read_template(Path(name).expanduser(), "data.template")
    found = tokenizer.template(tools=tools)
    return PLAIN if found is None else found


def read_template(path: Path, origin: str) -> str:
    """The template in the file ``path``, which ``origin`` names. Raises :class:`DataError`."""
    try:
        large = path.stat().st_size > _LARGEST
    except OSError as cause:
        raise unreadable(path, cause, origin) from cause
    if large:
        raise DataError(f"{path} is too large", why=f"more than {_LARGEST >> 20} MiB", origin=origin)
    return read_text(path, origin)
