"""A model's data source as its chat template needs it: the template, its special tokens, and tokens without text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.errors import DataError

if TYPE_CHECKING:
    from megatron_run.contracts import DataSource


def special_texts(data: DataSource) -> dict[str, str]:
    """The texts of the special tokens of ``data`` by the names that a template reads, such as ``bos_token``."""
    return {f"{kind}_token": text for kind, (text, _) in data.special_tokens.items()}


def no_template(place: object, fix: str) -> DataError:
    """The error for the model at ``place`` that has no chat template."""
    return DataError(f"{place} has no chat template", why="its tokenizer came without one", fix=fix)


def is_silent(data: DataSource, token: int) -> bool:
    """Whether ``token`` has no text between letters: at the start of a text, a space alone may have none either."""
    letter = data.encode("a")
    if letter is None:
        return False
    return data.decode([*letter, token, *letter]) == data.decode([*letter, *letter])
