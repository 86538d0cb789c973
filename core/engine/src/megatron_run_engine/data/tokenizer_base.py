"""The interface of every tokenizer, and what those of libraries share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_run.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run_engine.data.pair_layout import PairLayout


class Tokenizer(ABC):
    """Turns documents into ids in ``0..vocab_size-1``, one of which is ``end_of_document``. ``unit`` names a token.

    Tokenizers with one ``identity`` give every text the same ids.
    """

    unit: str
    vocab_size: int
    end_of_document: int
    #: Characters that no token stands for, in all that was encoded so far; white space is not counted.
    lost: int = 0

    @property
    @abstractmethod
    def identity(self) -> str:
        """Its identity in one line: library, version and hash; or ``bytes``."""

    @abstractmethod
    def encode(self, content: bytes, source: object) -> NDArray[np.integer[Any]]:
        """Return the ids of a document without ``end_of_document``. Raises :class:`DataError` naming ``source``."""

    def encode_text(self, text: str) -> Sequence[int]:
        """Return the ids of ``text``, a prompt mostly. Raises :class:`DataError` where it is no Unicode text.

        A shell passes on what is not UTF-8, and Python stands half of a surrogate pair in its place.
        """
        tokens: list[int] = self.encode(text_bytes(text), "the text").tolist()
        return tokens

    def encode_prompt(self, text: str) -> Sequence[int]:
        """The ids of ``text`` as a model is given it: with the tokens that the tokenizer puts around every text.

        Llama's and Gemma's begin a text with one. Raises as :meth:`encode_text`.
        """
        return self.encode_text(text)

    @property
    def special(self) -> Mapping[str, str]:
        """The texts of special tokens by their names at Hugging Face, such as ``bos_token``; empty if not said."""
        return {}

    def special_ids(self, end: int | None = None) -> dict[str, int]:
        """The ids that begin (``bos``), end (``eos``) and fill (``pad``) a text, as far as they are said.

        Where no ``eos`` is said, it is ``end``, which ended the documents of a run, or else ``end_of_document``.
        """
        end = self.end_of_document if end is None else end
        ids = {kind: self.vocabulary.get(self.special.get(f"{kind}_token", "")) for kind in ("bos", "eos", "pad")}
        found = {kind: number for kind, number in ids.items() if number is not None}
        return {"eos": end, **found} if end in self.vocabulary.values() else found

    def special_tokens(self) -> dict[str, tuple[str, int]]:
        """Text and id of each token of :attr:`special`, by its name without ``_token``."""
        known = ((key.removesuffix("_token"), text, self.vocabulary.get(text)) for key, text in self.special.items())
        return {kind: (text, number) for kind, text, number in known if number is not None}

    def template(self, *, tools: bool = False) -> str | None:
        """The chat template that comes with the tokenizer, for conversations with ``tools`` or without; None: none."""
        return None

    def pair_layout(self) -> PairLayout | None:
        """The tokens that the tokenizer puts around and between two texts; None where its files do not say it.

        Raises :class:`DataError` for what is no row of one text after the other.
        """
        return None

    @property
    def rows(self) -> int:
        """How many ids a model must know to read ordinary text: without added tokens above all others."""
        return self.vocab_size

    def encode_batch(self, documents: Sequence[tuple[object, bytes]]) -> Sequence[NDArray[np.integer[Any]]]:
        """Return the ids of each (source, content) as :meth:`encode` does; a library may use several cores."""
        return [self.encode(content, source) for source, content in documents]

    @abstractmethod
    def encode_places(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of ``text``, and the characters at which each token starts and stops, all [n]."""

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """The ids of tokens by their names in the vocabulary; those without a name are left out."""
        return {}

    @abstractmethod
    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ``tokens``. Tokens without text, such as ``end_of_document``, are left out.

        ``special`` tokens are left out too, as from what a model writes, or stand by their names, as in a dataset.
        """


def text_bytes(text: str) -> bytes:
    """``text`` as UTF-8. Raises :class:`DataError` where it is no Unicode text."""
    try:
        return text.encode()
    except UnicodeEncodeError as cause:
        why = "there is a byte that is not UTF-8, or half of a surrogate pair"
        raise DataError(f"the text has no character at place {cause.start}", why=why) from cause


def utf8_text(content: bytes, source: object) -> str:
    """``content`` as text. Raises :class:`DataError` naming ``source`` where it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise DataError(
            f"{source} is not UTF-8 at byte {cause.start}", fix="convert it, or set data.tokenizer to bytes"
        ) from cause


def library_identity(content: bytes, library: str) -> str:
    """The :attr:`Tokenizer.identity` of a tokenizer of ``library`` with the file ``content``."""
    return f"{library} {version(library)} {sha256(content).hexdigest()[:32]}"
