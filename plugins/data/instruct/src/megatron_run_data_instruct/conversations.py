"""From JSON lines to conversations: files, lines, and what is wrong with a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_run_engine.data.chat_template import (
    Message,
    NoConversation,
    checked_messages,
    checked_tools,
    kind_of,
)
from megatron_run_engine.data.user_files import file_lines, json_line

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_run_engine.data import Document


class Conversation(NamedTuple):
    """The turns, and the ``tools`` that the model may call, as JSON schemas; None where the line names none."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None


class Line(NamedTuple):
    """A line of a file that is not blank; ``number`` counts from 1."""

    path: Path
    number: int
    content: bytes

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


def lines_of(documents: Sequence[Document]) -> Iterator[Line]:
    """Yield the lines of ``documents`` that are not blank."""
    for document in documents:
        for number, content in file_lines(document.path, "data.paths"):
            if content.strip():
                yield Line(document.path, number, content.strip())


def conversation(content: bytes) -> Conversation:
    """The conversation of a line. Raises :class:`NoConversation`."""
    try:
        record = json_line(content)
    except ValueError as cause:
        raise NoConversation(str(cause)) from cause
    if not isinstance(record, dict):
        raise NoConversation(f"it is {kind_of(record)}, and must be an object")
    if "messages" in record:
        return Conversation(_messages(record["messages"]), checked_tools(record.get("tools")))
    if not {"prompt", "response"} <= record.keys():
        found = ", ".join(map(repr, record)) or "nothing"
        raise NoConversation(f"it has {found}, and must have 'messages', or 'prompt' and 'response'")
    turns = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["response"]}]
    return Conversation(_messages(turns), checked_tools(record.get("tools")))


def _messages(found: object) -> list[Message]:
    messages = checked_messages(found)
    if not any(message["role"] == "assistant" and _says(message) for message in messages):
        raise NoConversation("no message of the role 'assistant' says anything, so there is nothing to learn")
    return messages


def _says(message: Message) -> bool:
    return bool(message.get("content") or message.get("tool_calls"))
