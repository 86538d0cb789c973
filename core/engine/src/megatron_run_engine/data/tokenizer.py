"""Tokenizers: bytes, or a tokenizer that the `tokenizers` library has saved as JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_run.errors import DataError
from megatron_run.registry.discover import plain_name

if TYPE_CHECKING:
    import tokenizers
    from numpy.typing import NDArray

#: Names of the end-of-document token, in the order in which they are tried.
END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


#: The name under which a tokenizer's file is kept beside the weights that were trained with it.
TOKENIZER = "tokenizer.json"
#: The files beside a tokenizer's that may hold its chat template. They go where it goes.
CHAT_TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")


class Tokenizer(ABC):
    """Turns documents into ids in ``0..vocab_size-1``, one of which is ``end_of_document``. ``unit`` names a token."""

    unit: str
    vocab_size: int
    end_of_document: int

    @abstractmethod
    def encode(self, content: bytes, source: object) -> NDArray[np.int64]:
        """Return the ids of a document without ``end_of_document``. Raises :class:`DataError` naming ``source``."""

    @abstractmethod
    def encode_places(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of ``text``, and the characters at which each token starts and stops, all [n]."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``. Tokens without text, such as ``end_of_document``, are left out."""


class ByteTokenizer(Tokenizer):
    """One token per byte and one for the end of a document: 257 ids for any file, without a vocabulary."""

    unit = "byte"
    vocab_size = 257
    end_of_document = 256

    def encode(self, content: bytes, source: object) -> NDArray[np.int64]:
        """Return the bytes as ids. Never fails."""
        return np.frombuffer(content, np.uint8).astype(np.int64)

    def encode_places(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the bytes of ``text``, each at its character."""
        starts = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
        return self.encode(text.encode(), "the text"), starts, starts + 1

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode the bytes as UTF-8, with U+FFFD for invalid ones."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class JsonTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, read from its JSON file.

    ``end_of_document`` is the first of ``END_OF_DOCUMENT`` in the vocabulary, or an additional id if there is none.
    Raises :class:`DataError` if the file is missing or broken.
    """

    unit = "token"

    def __init__(self, path: Path) -> None:
        self._tokenizer = _read(path)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        known = [vocabulary[name] for name in END_OF_DOCUMENT if name in vocabulary]
        highest = max(vocabulary.values(), default=-1)  # ids may have gaps, so their number is not enough
        self.end_of_document = known[0] if known else highest + 1
        self.vocab_size = max(highest, self.end_of_document) + 1

    def encode(self, content: bytes, source: object) -> NDArray[np.int64]:
        """Return the ids of a UTF-8 document, without the special tokens that a template would add, such as [CLS]."""
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as cause:
            raise DataError(
                f"{source} is not UTF-8 at byte {cause.start}", fix="convert it, or set data.tokenizer to bytes"
            ) from cause
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def encode_places(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of ``text`` as :meth:`encode` does, and where their tokens lie in it."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        places = np.array(found.offsets, np.int64).reshape(-1, 2)
        return np.array(found.ids, np.int64), places[:, 0], places[:, 1]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def _read(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    if not path.is_file():
        raise DataError(
            f"tokenizer file {path} does not exist",
            origin="data.tokenizer",
            fix="name the tokenizer.json of the `tokenizers` library, or say bytes",
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as cause:  # the library raises a bare Exception
        why = " ".join(str(cause).split())
        raise DataError(f"tokenizer file {path} is broken", why=why, origin="data.tokenizer") from cause
    tokenizer.no_truncation()  # a file may carry limits that would drop the rest of every document
    tokenizer.no_padding()
    return tokenizer


def byte_tokenizer_json() -> bytes:
    """The ids of :class:`ByteTokenizer` as a file of the `tokenizers` library, for programs that read only those.

    Its tokens are GPT-2's characters for bytes: printable ones for themselves, the others from U+0100 on.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    vocabulary = {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END_OF_DOCUMENT[0]])  # gets the next id, ByteTokenizer.end_of_document
    return str(made.to_str(pretty=True)).encode()


def reads_bytes(identity: Mapping[str, Any]) -> bool:
    """Whether the data of a run, by the keys of its ``identity``, is text read byte by byte."""
    return plain_name(str(identity.get("data.use"))) == "text" and identity.get("data.tokenizer") == "bytes"


def same_vocabulary(first: Path | None, second: Path | None) -> bool:
    """Whether two files, or bytes where there is None, give every token the same id. Raises :class:`DataError`."""
    return first == second or _vocabulary(first) == _vocabulary(second)


def _vocabulary(file: Path | None) -> Mapping[str, int]:
    import tokenizers

    opened = tokenizers.Tokenizer.from_buffer(byte_tokenizer_json()) if file is None else _read(file)
    return opened.get_vocab(with_added_tokens=True)


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer ``bytes``, or the one in the file ``name``."""
    return ByteTokenizer() if name == "bytes" else JsonTokenizer(Path(name).expanduser())
