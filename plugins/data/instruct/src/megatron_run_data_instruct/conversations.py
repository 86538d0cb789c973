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

#: One turn: its role, its content, and what else a template reads, such as ``tool_calls``.
Message = dict[str, Any]


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
        for number, content in enumerate(byte_lines(document.read()), start=1):
            if content.strip():
                yield Line(document.path, number, content.strip())


def conversation(content: bytes) -> Conversation:
    """The conversation of a line. Raises :class:`NoConversation`."""
    try:
        record = json_line(content)
    except ValueError as cause:
        raise NoConversation(str(cause)) from cause
    if not isinstance(record, dict):
        raise NoConversation(f"it is {_kind(record)}, and must be an object")
    if "messages" in record:
        return Conversation(_messages(record["messages"]), _tools(record.get("tools")))
    if not {"prompt", "response"} <= record.keys():
        found = ", ".join(map(repr, record)) or "nothing"
        raise NoConversation(f"it has {found}, and must have 'messages', or 'prompt' and 'response'")
    turns = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["response"]}]
    return Conversation(_messages(turns), _tools(record.get("tools")))


def _tools(found: object) -> list[dict[str, Any]] | None:
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise NoConversation("its tools must be a list of objects, as JSON schemas")
    _check_texts("its tools", found)
    return found


def _check_texts(name: str, value: object) -> None:
    """Raise :class:`NoConversation` for a text in ``value``, called ``name``, that no template can render."""
    if isinstance(value, dict):
        for key, each in value.items():
            _check_texts(f"{key} of {name}", each)
            _check_text(f"a key of {name}", key)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            _check_texts(f"{number} of {name}", each)
    elif isinstance(value, str):
        _check_text(name, value)


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise NoConversation(f"{name} has half of a surrogate pair, which is no character") from cause
    if BEGIN in text or END in text:
        raise NoConversation(f"{name} holds U+FDD0 or U+FDD1, which no text may")


def _messages(found: object) -> list[Message]:
    if not isinstance(found, list) or not found:
        raise NoConversation("its messages must be a list of one or more")
    for number, message in enumerate(found):
        if not isinstance(message, dict):
            raise NoConversation(f"message {number} is {_kind(message)}, and must be an object")
        _check_texts(f"message {number}", message)
        for key in ("role", "content"):
            text = message.get(key)
            if not isinstance(text, str) and not (key == "content" and text is None and message.get("tool_calls")):
                raise NoConversation(f"{key} of message {number} is {_kind(text)}, and must be text")
    if not any(message["role"] == "assistant" and _says(message) for message in found):
        raise NoConversation("no message of the role 'assistant' says anything, so there is nothing to learn")
    return found


def _says(message: Message) -> bool:
    return bool(message.get("content") or message.get("tool_calls"))


def _kind(value: object) -> str:
    kinds = {type(None): "missing", str: "text", list: "a list", dict: "an object", bool: "a truth value"}
    return kinds.get(type(value), "a number")
