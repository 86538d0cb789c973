"""Tokenizers: bytes, those of the `tokenizers` library, and SentencePiece's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_run.errors import DataError
from megatron_run_engine.data.lost_text import counter_of_lost
from megatron_run_engine.data.tokenizer_files import SENTENCEPIECE, find_file, read_tokenizer
from megatron_run_engine.data.user_cache import replacing, user_cache

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Names of the end-of-document token, in the order in which they are tried.
END_OF_DOCUMENT = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "[SEP]"),  # DeepSeek's, BERT's
)

#: The name under which a tokenizer's file is kept beside the weights that were trained with it.
TOKENIZER = "tokenizer.json"
#: The file beside it that names special tokens, and those that may hold its chat template. They go where it goes.
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATES = ("chat_template.jinja", TOKENIZER_CONFIG)
#: All files beside it that say how it is used.
BESIDE = (*CHAT_TEMPLATES, "special_tokens_map.json", "added_tokens.json")


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
        """What it is, in one line: library, version and hash; or ``bytes``."""

    @abstractmethod
    def encode(self, content: bytes, source: object) -> NDArray[np.integer[Any]]:
        """Return the ids of a document without ``end_of_document``. Raises :class:`DataError` naming ``source``."""

    def encode_text(self, text: str) -> Sequence[int]:
        """Return the ids of ``text``, a prompt mostly. Raises :class:`DataError` where it is no Unicode text.

        A shell passes on what is not UTF-8, and Python stands half of a surrogate pair in its place.
        """
        try:
            content = text.encode()
        except UnicodeEncodeError as cause:
            why = "there is a byte that is not UTF-8, or half of a surrogate pair"
            raise DataError(f"the text has no character at place {cause.start}", why=why) from cause
        tokens: list[int] = self.encode(content, "the text").tolist()
        return tokens

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
    """A tokenizer of the `tokenizers` library: its JSON file, or another form that :func:`read_tokenizer` reads.

    ``end_of_document`` is the first of ``END_OF_DOCUMENT`` in the vocabulary, or an additional id if there is none.
    Raises :class:`DataError` if the file is missing or broken.
    """

    unit = "token"

    def __init__(self, path: Path) -> None:
        self._tokenizer, self._path = read_tokenizer(path), path
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        known = [vocabulary[name] for name in END_OF_DOCUMENT if name in vocabulary]
        highest = max(vocabulary.values(), default=-1)  # ids may have gaps, so their number is not enough
        self.end_of_document = known[0] if known else highest + 1
        self.vocab_size = max(highest, self.end_of_document) + 1
        self._lost = counter_of_lost(self._tokenizer, byte_characters())

    @cached_property
    def identity(self) -> str:
        """Library, version, and the hash of the whole tokenizer."""
        return _identity(self._tokenizer.to_str().encode(), "tokenizers")

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Of the file, added tokens included."""
        known: Mapping[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return known

    def encode(self, content: bytes, source: object) -> NDArray[np.integer[Any]]:
        """Return the ids of a UTF-8 document, without the special tokens that a template would add, such as [CLS]."""
        text = _text(content, source)
        with self._naming(source):
            found = self._tokenizer.encode(text, add_special_tokens=False)
        self._count_lost(text)
        return np.array(found.ids, np.int64)

    def encode_batch(self, documents: Sequence[tuple[object, bytes]]) -> Sequence[NDArray[np.integer[Any]]]:
        """Return the ids of each (source, content), by as many threads as the library takes."""
        texts = [_text(content, source) for source, content in documents]
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
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    @contextmanager
    def _naming(self, source: object) -> Iterator[None]:
        """Raise :class:`DataError` for whatever the library does to ``source`` by a file that is wrong in itself."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as cause:  # it raises bare Exceptions, and panics, which are none
            why = " ".join(str(cause).split())
            raise DataError(f"tokenizer {self._path} fails on {source}", why=why, origin="data.tokenizer") from cause


class SentencePieceTokenizer(Tokenizer):
    """A model of the `sentencepiece` library, which gives the ids: its conversion to `tokenizers` is not always exact.

    Text never stands for a control symbol, so ``</s>`` in it is five characters. ``end_of_document`` is the model's end
    of sentence, or an additional id. Raises :class:`DataError` if the library or the file is missing, or it is broken.
    """

    unit = "token"

    def __init__(self, path: Path) -> None:
        self._model = _sentencepiece(path)
        self._path = path
        pieces = self._model.get_piece_size()
        self.end_of_document = self._model.eos_id() if self._model.eos_id() >= 0 else pieces
        self.vocab_size = max(pieces, self.end_of_document + 1)

    @cached_property
    def identity(self) -> str:
        """Library, version, and the hash of the model's file."""
        return _identity(self._path.read_bytes(), "sentencepiece")

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Of the model's pieces."""
        return {self._model.id_to_piece(piece): piece for piece in range(self._model.get_piece_size())}

    def encode(self, content: bytes, source: object) -> NDArray[np.integer[Any]]:
        """Return the ids of a UTF-8 document, without a begin or an end of sentence."""
        return np.array(self._model.encode(_text(content, source)), np.int64)

    def encode_places(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of ``text`` as :meth:`encode` does, and where their tokens lie in it."""
        found = self._model.encode_as_offset_mapping(text)
        places = np.array(found["offsets"], np.int64).reshape(-1, 2)
        starts, stops = places[:, 0], places[:, 1]
        for token in range(len(places) - 2, -1, -1):  # only the last byte of a character is given its place
            if starts[token] == stops[token] == starts[token + 1]:
                stops[token] = stops[token + 1]
        return np.array(found["ids"], np.int64), starts, stops

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ``tokens``; control symbols have none, and no text stands for them."""
        return str(self._model.decode([token for token in tokens if token < self._model.get_piece_size()]))


def _text(content: bytes, source: object) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise DataError(
            f"{source} is not UTF-8 at byte {cause.start}", fix="convert it, or set data.tokenizer to bytes"
        ) from cause


def _identity(content: bytes, library: str) -> str:
    return f"{library} {version(library)} {sha256(content).hexdigest()[:32]}"


def _sentencepiece(path: Path) -> Any:
    try:
        from sentencepiece import SentencePieceProcessor
    except ModuleNotFoundError as cause:
        raise DataError(
            f"tokenizer {path} needs the library sentencepiece",
            origin="data.tokenizer",
            fix="pip install 'megatron-run-engine[sentencepiece]'",
        ) from cause
    try:
        return SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as cause:
        why = " ".join(str(cause).split())
        raise DataError(f"tokenizer file {path} is broken", why=why, origin="data.tokenizer") from cause


def byte_characters() -> dict[str, int]:
    """The characters by which GPT-2's vocabulary names bytes: printable ones themselves, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


def byte_tokenizer_json() -> bytes:
    """The ids of :class:`ByteTokenizer` as a file of the `tokenizers` library, for programs that read only those.

    Its tokens are :func:`byte_characters`.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    made = tokenizers.Tokenizer(models.BPE(vocab=byte_characters(), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END_OF_DOCUMENT[0]])  # gets the next id, ByteTokenizer.end_of_document
    return str(made.to_str(pretty=True)).encode()


def reads_bytes(identity: Mapping[str, Any]) -> bool:
    """Whether the data of a run, by the keys of its ``identity``, is read byte by byte, whichever source reads it."""
    return identity.get("data.tokenizer") == "bytes"


def same_vocabulary(first: Path | None, second: Path | None) -> bool:
    """Whether two files, or bytes where there is None, give every token the same id. Raises :class:`DataError`."""
    return first == second or _vocabulary(first) == _vocabulary(second)


def _vocabulary(file: Path | None) -> Mapping[str, int]:
    import tokenizers

    if file is not None and file.suffix == SENTENCEPIECE:
        return SentencePieceTokenizer(file).vocabulary
    opened = tokenizers.Tokenizer.from_buffer(byte_tokenizer_json()) if file is None else read_tokenizer(file)
    return opened.get_vocab(with_added_tokens=True)


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer ``bytes``, or the one in the file or folder ``name`` (see :func:`find_file`)."""
    if name == "bytes":
        return ByteTokenizer()
    path = find_file(Path(name).expanduser())
    return SentencePieceTokenizer(path) if path.suffix == SENTENCEPIECE else JsonTokenizer(path)


def json_file(name: str) -> Path | None:
    """Return the JSON file of the tokenizer ``name``: a conversion in the user's cache where it has another form.

    A SentencePiece model has none and is returned itself. None for bytes, and without a cache.
    """
    path = None if name == "bytes" else find_file(Path(name).expanduser())
    if path is None:
        return None
    if not path.name.endswith((".txt", "vocab.json")):
        return path
    content = read_tokenizer(path).to_str()
    try:
        converted = user_cache("tokenizers") / f"{sha256(content.encode()).hexdigest()[:32]}.json"
        with replacing(converted) as file:
            file.write(content.encode())
    except OSError:
        return None
    return converted
