"""Sources of a tokenizer's ids: the part of the contract that is about the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from megatron_run.contracts import DataSource
from megatron_run_engine.data.standalone_tokenizer import json_file
from megatron_run_engine.data.tokenizer import open_tokenizer
from megatron_run_engine.data.tokenizer_base import Tokenizer


class TokenizedSource(DataSource):
    """Samples of the ids of a tokenizer, opened when it is first needed; ``name`` is the value of data.tokenizer."""

    def __init__(self, name: str) -> None:
        self._tokenizer_name = name

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises :class:`megatron_run.errors.DataError` if it is missing or broken."""
        return open_tokenizer(self._tokenizer_name)

    @property
    def vocab_size(self) -> int:
        """The number of ids of the tokenizer."""
        return self.tokenizer.vocab_size

    @property
    def tokenizer_file(self) -> Path | None:
        """The file of ``data.tokenizer`` that is kept beside the weights, None for bytes."""
        return json_file(self._tokenizer_name)

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of ``text``, without special tokens."""
        return self.tokenizer.encode_text(text)

    def encode_prompt(self, text: str) -> Sequence[int]:
        """Return the token ids of ``text``, with the special tokens that the tokenizer puts around it."""
        return self.tokenizer.encode_prompt(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``."""
        return self.tokenizer.decode(tokens)

    @property
    def special_tokens(self) -> Mapping[str, tuple[str, int]]:
        """As the tokenizer's folder says."""
        return self.tokenizer.special_tokens()
