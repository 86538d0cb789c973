"""A tokenizer of the library tokenizers as JSON, which takes as much time and memory as its highest id says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

#: No vocabulary has as many ids.
_MOST_IDS = 1 << 24


def check_ids(tokenizer: tokenizers.Tokenizer) -> None:
    """Raise ValueError where an id is so large that whoever goes through all up to it would come to no end."""
    if max(tokenizer.get_vocab().values(), default=0) >= _MOST_IDS:
        raise ValueError(f"it has an id above {_MOST_IDS}")


def to_json(tokenizer: tokenizers.Tokenizer, *, pretty: bool = False) -> str:
    """``tokenizer`` as the library writes it. Raises what :func:`check_ids` does."""
    check_ids(tokenizer)
    return str(tokenizer.to_str(pretty=pretty))
