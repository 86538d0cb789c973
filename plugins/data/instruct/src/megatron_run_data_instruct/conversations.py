"""From JSON lines to conversations: files, lines, and what is wrong with a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_run_data_instruct.renderer import BEGIN, END
from megatron_run_data_instruct.template import NoConversation
from megatron_run_engine.data.user_files import byte_lines, json_line

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_run_engine.data.documents import Document

#: One turn: its role, and its content.
Message = dict[str, Any]


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
        for number, content in enumerate(byte_lines(document.read()), start=1):
            if content.strip():
                yield Line(document.path, number, content.strip())


def conversation(content: bytes) -> list[Message]:
    """The messages of a line. Raises :class:`NoConversation`."""
    try:
        record = json_line(content)
    except ValueError as cause:
        raise NoConversation(str(cause)) from cause
    if not isinstance(record, dict):
        raise NoConversation(f"it is {_kind(record)}, and must be an object")
    if "messages" in record:
        return _messages(record["messages"])
    if not {"prompt", "response"} <= record.keys():
        found = ", ".join(map(repr, record)) or "nothing"
        raise NoConversation(f"it has {found}, and must have 'messages', or 'prompt' and 'response'")
    return _messages(
        [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["response"]}]
    )


def _messages(found: object) -> list[Message]:
    if not isinstance(found, list) or not found:
        raise NoConversation("its messages must be a list of one or more")
    for number, message in enumerate(found):
        if not isinstance(message, dict):
            raise NoConversation(f"message {number} is {_kind(message)}, and must be an object")
        for key in ("role", "content"):
            text = message.get(key)
            if not isinstance(text, str):
                raise NoConversation(f"{key} of message {number} is {_kind(text)}, and must be text")
            try:
                text.encode()
            except UnicodeEncodeError as cause:
                what = f"{key} of message {number} has half of a surrogate pair, which is no character"
                raise NoConversation(what) from cause
            if BEGIN in text or END in text:
                raise NoConversation(f"{key} of message {number} holds U+FDD0 or U+FDD1, which no text may")
    if not any(message["role"] == "assistant" and message["content"] for message in found):
        raise NoConversation("no message of the role 'assistant' says anything, so there is nothing to learn")
    return found


def _kind(value: object) -> str:
    kinds = {type(None): "missing", str: "text", list: "a list", dict: "an object", bool: "a truth value"}
    return kinds.get(type(value), "a number")
