"""The messages of a conversation and the tools of a model, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_run.errors.wording import did_you_mean
from megatron_run_engine.data.chat_template.renderer import BEGIN, END

#: One turn: its role, its content, and what else a template reads, such as ``tool_calls``.
Message = dict[str, Any]


class NoConversation(Exception):
    """The fault of a conversation, or with its messages to the template."""


def checked_messages(found: object) -> list[Message]:
    """``found``, if it is one or more messages, each with a role and a text. Raises :class:`NoConversation`."""
    if not isinstance(found, list) or not found:
        raise NoConversation("its messages must be a list of one or more")
    for number, message in enumerate(found):
        if not isinstance(message, dict):
            raise NoConversation(f"message {number} is {kind_of(message)}, and must be an object")
        _check_texts(f"message {number}", message)
        for key in ("role", "content"):
            text = message.get(key)
            if not isinstance(text, str) and not (key == "content" and text is None and message.get("tool_calls")):
                raise NoConversation(f"{key} of message {number} is {kind_of(text)}, and must be text")
    return found


#: The roles that models know by custom; a template names any other one that it tells apart.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def check_roles(messages: Sequence[Mapping[str, Any]], named: Collection[str]) -> None:
    """Raise :class:`NoConversation` for a role that is neither one of ``ROLES`` nor ``named`` by the chat template.

    Many templates write whatever they find, and would teach a model a misspelt role.
    """
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and role not in named:
            known = (*ROLES, *(each for each in sorted(named) if each not in ROLES))
            meant = did_you_mean(role, known) or f"roles are {', '.join(ROLES)}, and those that the chat template names"
            raise NoConversation(f"role of message {number} is {role!r}; {meant}")


def checked_tools(found: object) -> list[dict[str, Any]] | None:
    """``found``, if it is None or a list of tools, as JSON schemas. Raises :class:`NoConversation`."""
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


def kind_of(value: object) -> str:
    """The name of the type of ``value`` in JSON."""
    kinds = {type(None): "missing", str: "text", list: "a list", dict: "an object", bool: "a truth value"}
    return kinds.get(type(value), "a number")
