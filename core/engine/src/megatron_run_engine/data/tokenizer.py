"""Opens tokenizers: bytes, those of the `tokenizers` library, and SentencePiece's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_run.errors import DataError
from megatron_run_engine.data.lost_text import counter_of_lost
from megatron_run_engine.data.pair_layout import PairLayout, layout_of
from megatron_run_engine.data.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron_run_engine.data.tokenizer_base import Tokenizer, library_identity, text_bytes, utf8_text
from megatron_run_engine.data.tokenizer_files import SENTENCEPIECE, find_tokenizer, opened
from megatron_run_engine.data.tokenizer_folder import FolderTokenizer, template_for
from megatron_run_engine.data.tokenizer_json import to_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Names of the end-of-document token where nothing says which it is, in the order in which they are tried.
END_OF_DOCUMENT = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "[SEP]"),  # DeepSeek's, BERT's
)

#: The module of what a library in Rust raises where it panics, which is no Exception.
_PANICS = "pyo3_runtime"


class ByteTokenizer(Tokenizer):
    """One token per byte and one for the end of a document: 257 ids for any file, without a vocabulary."""

    unit = "byte"
    vocab_size = 257
    end_of_document = 256

    @property
    def identity(self) -> str:
        """Always the same."""
        return "bytes"

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """The bytes of ASCII, by their characters."""
        return {chr(byte): byte for byte in range(128)}

    def encode(self, content: bytes, source: object) -> NDArray[np.integer[Any]]:
        """Return the bytes as ids. Never fails."""
        return np.frombuffer(content, np.uint8)

    def encode_places(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the bytes of ``text``, each at its character."""
        starts = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
        return self.encode(text.encode(), "the text").astype(np.int64), starts, starts + 1

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Decode the bytes as UTF-8, with U+FFFD for invalid ones."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class JsonTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library: a folder's, its JSON file, or another form that :func:`opened` reads.

    ``end_of_document`` is what the folder says: its ``eos_token``, else its ``sep_token``. Where it says neither, the
    first of ``END_OF_DOCUMENT`` in the vocabulary (among a folder's special tokens), else an additional id.
    Raises :class:`DataError` if the file is missing or broken.
    """

    unit = "token"

    def __init__(self, path: Path, folder: FolderTokenizer | None = None) -> None:
        self._tokenizer, self._path, self._folder = opened(path, folder), path, folder
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        end = _end_of_document(vocabulary, self._special_names(), folder)
        highest = max(vocabulary.values(), default=-1)  # ids may have gaps, so their number is not enough
        self.end_of_document = highest + 1 if end is None else end
        self.vocab_size = max(highest, self.end_of_document) + 1
        self._lost = counter_of_lost(self._tokenizer, byte_characters())

    def _special_names(self) -> frozenset[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def identity(self) -> str:
        """Library, version, and the hash of the whole tokenizer."""
        content = to_json(self._tokenizer)
        if self._folder is not None:  # its JSON however it was written
            content = replace(self._folder, backend=content).to_json()
        return library_identity(content.encode(), "tokenizers")

    @property
    def special(self) -> Mapping[str, str]:
        """As the folder says."""
        return {} if self._folder is None else self._folder.special

    def template(self, *, tools: bool = False) -> str | None:
        """As the folder says."""
        return None if self._folder is None else template_for(self._folder.templates, tools=tools)

    def pair_layout(self) -> PairLayout | None:
        """As its post-processor does; nothing at all where a folder has none."""
        try:
            found = layout_of(self._tokenizer)
        except ValueError as cause:
            what = f"tokenizer {self._path} has no layout of two texts"
            raise DataError(what, why=str(cause), origin="data.tokenizer") from cause
        return PairLayout((), (), ()) if found is None and self._folder is not None else found

    def plain_special(self, end: int | None = None) -> dict[str, str]:
        """``end``, or the end of a document, as ``eos_token`` of a file without a folder, if it is a special token."""
        name = self._tokenizer.id_to_token(self.end_of_document if end is None else end)
        return {"eos_token": name} if name in self._special_names() else {}

    @cached_property
    def rows(self) -> int:
        """The ids of the model and the end of a document; added tokens above them stand for themselves alone."""
        plain = self._tokenizer.get_vocab(with_added_tokens=False).values()
        return max(*plain, self.end_of_document, 0) + 1

    def encode_prompt(self, text: str) -> Sequence[int]:
        """The ids of ``text`` with the special tokens that the tokenizer puts around it."""
        text_bytes(text)
        with self._naming("the text"):
            found: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        return found

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Of the file, added tokens included."""
        known: Mapping[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return known

    def encode(self, content: bytes, source: object) -> NDArray[np.integer[Any]]:
        """Return the ids of a UTF-8 document, without the special tokens that a template would add, such as [CLS]."""
        text = utf8_text(content, source)
        with self._naming(source):
            found = self._tokenizer.encode(text, add_special_tokens=False)
        self._count_lost(text)
        return np.array(found.ids, np.int64)

    def encode_batch(self, documents: Sequence[tuple[object, bytes]]) -> Sequence[NDArray[np.integer[Any]]]:
        """Return the ids of each (source, content), by as many threads as the library takes."""
        texts = [utf8_text(content, source) for source, content in documents]
        with self._naming("a document"):
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # fast: no offsets
        self._count_lost(*texts)
        return [np.array(each.ids, np.int64) for each in encoded]

    def encode_places(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of ``text`` as :meth:`encode` does, and where their tokens lie in it."""
        with self._naming("the text"):
            found = self._tokenizer.encode(text, add_special_tokens=False)
        self._count_lost(text)
        places = np.array(found.offsets, np.int64).reshape(-1, 2)
        return np.array(found.ids, np.int64), places[:, 0], places[:, 1]

    def _count_lost(self, *texts: str) -> None:
        if self._lost is not None:
            self.lost += sum(map(self._lost.count, texts))

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ``tokens``."""
        with self._naming("ids"):
            text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))
        return _cleaned_up(text) if self._folder is not None and self._folder.cleans_up else text

    @contextmanager
    def _naming(self, source: object) -> Iterator[None]:
        """Raise :class:`DataError` for whatever the library does to ``source`` by a file that is wrong in itself."""
        try:
            yield
        except BaseException as cause:
            if not isinstance(cause, Exception) and type(cause).__module__ != _PANICS:  # a signal's, while it worked
                raise
            why = " ".join(str(cause).split())
            raise DataError(f"tokenizer {self._path} fails on {source}", why=why, origin="data.tokenizer") from cause


def _end_of_document(
    vocabulary: Mapping[str, int], special: Collection[str], folder: FolderTokenizer | None
) -> int | None:
    """The id that ends a document; None where neither the folder nor a name tells."""
    said = {} if folder is None else folder.special
    named = [said[kind] for kind in ("eos_token", "sep_token") if kind in said]
    known = [name for name in END_OF_DOCUMENT if not said or name in special]
    return next((vocabulary[name] for name in (*named, *known) if name in vocabulary), None)


#: What transformers replaces, in this order, where ``clean_up_tokenization_spaces`` is set.
_CLEANED = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't")),
    *((" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)


def _cleaned_up(text: str) -> str:
    for found, kept in _CLEANED:
        text = text.replace(found, kept)
    return text


def byte_characters() -> dict[str, int]:
    """The characters by which GPT-2's vocabulary names bytes: printable ones themselves, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


def files_of_tokenizer(name: str) -> tuple[Path, ...]:
    """The files of the tokenizer ``name``, none of ``bytes``. Raises :class:`DataError` as :func:`find_tokenizer`."""
    if name == "bytes":
        return ()
    file, folder = find_tokenizer(Path(name).expanduser())
    return (file,) if folder is None else tuple(file.parent.iterdir())


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer ``bytes``, or the one in the file or folder ``name`` (see :func:`find_tokenizer`)."""
    if name == "bytes":
        return ByteTokenizer()
    path, folder = find_tokenizer(Path(name).expanduser())
    if folder is None and path.suffix == SENTENCEPIECE:
        return SentencePieceTokenizer(path)
    return JsonTokenizer(path, folder)
