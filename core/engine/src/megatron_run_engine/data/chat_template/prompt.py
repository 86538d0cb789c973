"""The tokens that a model is given to answer a conversation, and those at which its answer ends."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_run.errors import DataError, InputError
from megatron_run_engine.data.chat_template.chat_messages import NoConversation, checked_messages, checked_tools
from megatron_run_engine.data.chat_template.of_source import is_silent, no_template, special_texts
from megatron_run_engine.data.chat_template.template import PLAIN, ChatTemplate

if TYPE_CHECKING:
    from megatron_run.contracts import DataSource

#: What follows an answer, up to the end of its first line.
_FIRST_LINE = re.compile(r"\s*[^\n]*\S")


class AnswerPrompt(NamedTuple):
    """The ``tokens`` of a conversation and of the beginning of an answer.

    The answer's turn ends at one of ``ends``, or before one of the texts ``stops``, by what the template writes there.
    """

    tokens: list[int]
    ends: frozenset[int]
    stops: tuple[str, ...]


class ChatPrompts:
    """The prompts of a model with the tokenizer and the templates of ``data``; ``place`` names it in errors."""

    def __init__(self, data: DataSource, place: object) -> None:
        self._data, self._place = data, place
        self._special = special_texts(data)
        self._last: tuple[tuple[str, str | None], ChatTemplate] | None = None  # it has a process

    def of(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        template: str | None = None,
        date: str | None = None,
    ) -> AnswerPrompt:
        """The prompt for an answer to ``messages``, with the ids of transformers' ``apply_chat_template``.

        ``tools`` are those that the model may call, as JSON schemas; ``template`` is Jinja, by default the model's own;
        ``date`` is what it reads as today, None for the moment. Raises :class:`InputError` for messages that cannot be
        answered, :class:`DataError` without a template and for one that is broken.
        """
        source = self._data.chat_template(tools=tools is not None) if template is None else template
        if source is None:
            fix = "give one, --template FILE, in Python template=TEXT; or let it continue plain text, without --chat"
            raise no_template(self._place, fix)
        try:
            read = checked_messages([dict(message) for message in messages])
            schemas = checked_tools(None if tools is None else list(tools))
            made = self._template(source, date)
            tokens, between = self._ids(made.prompt(read, schemas)), made.after_answer(read, schemas)
        except NoConversation as cause:
            raise InputError("the conversation cannot be answered", why=str(cause)) from cause
        return AnswerPrompt(tokens, *self._ends(between, plain=source == PLAIN))

    def _template(self, source: str, date: str | None) -> ChatTemplate:
        """The template ``source``, which is made anew only where it differs from the last one."""
        key = source, date
        if self._last is None or self._last[0] != key:
            self._last = key, ChatTemplate(source, self._place, self._special, date)
        return self._last[1]

    def _ends(self, between: str, *, plain: bool) -> tuple[frozenset[int], tuple[str, ...]]:
        """Tokens and texts that end an answer: what stands ``between`` it and the next turn begins with them."""
        silent = [token for token in self._ids(between) if is_silent(self._data, token)][:1]
        end = self._data.end_of_text if plain else None
        line = None if silent else _FIRST_LINE.match(between)
        return frozenset(silent if end is None else (*silent, end)), () if line is None else (line[0],)

    def _ids(self, text: str) -> list[int]:
        found = self._data.encode(text)
        if found is None:
            raise DataError(f"{self._place} has no tokenizer", why="the model was trained on tokens that are no text")
        return list(found)
