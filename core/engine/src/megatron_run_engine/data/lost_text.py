"""Text for which a tokenizer has no token: where it may vanish, and how much of it does.

BPE without an unknown token skips what is not in its vocabulary, as transformers does. So ids stay as they are, and the
characters are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


def counter_of_lost(tokenizer: tokenizers.Tokenizer, bytes_: Mapping[str, int]) -> LostText | None:
    """The counter of the text that ``tokenizer`` loses; None for one that has a token for every text.

    ``bytes_`` are the characters by which GPT-2's vocabulary names bytes.
    """
    model, vocabulary = tokenizer.model, tokenizer.get_vocab(with_added_tokens=False)
    if type(model).__name__ != "BPE" or model.unk_token is not None:
        return None  # other models have an unknown token, or refuse
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return None
    by_bytes = "ByteLevel" in repr((tokenizer.pre_tokenizer, tokenizer.normalizer))
    return None if by_bytes and bytes_.keys() <= vocabulary.keys() else LostText(tokenizer, by_bytes=by_bytes)


class LostText:
    """Counts characters without a token. A character has one in every text, or in none: BPE begins with characters."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, by_bytes: bool) -> None:
        self._tokenizer, self._by_bytes = tokenizer, by_bytes
        self._added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        self._known: dict[str, bool] = {}

    def count(self, text: str) -> int:
        """The characters of ``text`` that no token stands for, white space and what is normalised away not counted."""
        if not self._lost_in(text):
            return 0
        for token in self._added:  # it is a token, whatever characters its name has
            text = text.replace(token, " ")
        return self._lost_in(text)

    def _lost_in(self, text: str) -> int:
        return sum(times for character, times in Counter(text).items() if self._is_lost(character))

    def _is_lost(self, character: str) -> bool:
        if character not in self._known:
            self._known[character] = not character.isspace() and self._vanishes(character)
        return self._known[character]

    def _vanishes(self, character: str) -> bool:
        normaliser = self._tokenizer.normalizer
        if normaliser is not None and not normaliser.normalize_str(character).strip():
            return False
        tokens = self._tokenizer.encode(character, add_special_tokens=False).tokens
        return sum(map(len, tokens)) < len(character.encode()) if self._by_bytes else not tokens
