"""Models of the `sentencepiece` library as tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_run.errors import DataError
from megatron_run.errors.install_hint import ENGINE, how_to_add
from megatron_run_engine.data.tokenizer_base import Tokenizer, library_identity, utf8_text
from megatron_run_engine.data.tokenizer_files import no_sentencepiece
from megatron_run_engine.data.tokenizer_folder.folder_files import read_tokenizer_file, template_beside
from megatron_run_engine.data.tokenizer_folder.record import CHAT_TEMPLATE

if TYPE_CHECKING:
    from numpy.typing import NDArray


class SentencePieceTokenizer(Tokenizer):
    """A model of the `sentencepiece` library, which gives the ids: its conversion to `tokenizers` is not always exact.

    Text never stands for a control symbol, so ``</s>`` in it is five characters. ``end_of_document`` is the model's end
    of sentence, or an additional id; the chat template lies beside the file. Raises :class:`DataError` if the library
    or the file is missing, or it is broken.
    """

    unit = "token"

    def __init__(self, path: Path) -> None:
        self.content = read_tokenizer_file(path)
        self._model = _sentencepiece(path, self.content)
        pieces = self._model.get_piece_size()
        self.end_of_document = self._model.eos_id() if self._model.eos_id() >= 0 else pieces
        self.vocab_size = max(pieces, self.end_of_document + 1)
        self._path = path

    @cached_property
    def identity(self) -> str:
        """Library, version, and the hash of the model's file."""
        return library_identity(self.content, "sentencepiece")

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Of the model's pieces."""
        return {self._model.id_to_piece(piece): piece for piece in range(self._model.get_piece_size())}

    def template(self, *, tools: bool = False) -> str | None:
        """The one beside the model's file. Raises :class:`DataError`."""
        found = template_beside(self._path)
        return None if found is None else utf8_text(found, self._path.with_name(CHAT_TEMPLATE))

    def encode(self, content: bytes, source: object) -> NDArray[np.integer[Any]]:
        """Return the ids of a UTF-8 document, without a begin or an end of sentence."""
        return np.array(self._model.encode(utf8_text(content, source)), np.int64)

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


def _sentencepiece(path: Path, content: bytes) -> Any:
    try:
        from sentencepiece import SentencePieceProcessor
    except ModuleNotFoundError as cause:
        raise DataError(
            f"tokenizer {path} needs the library sentencepiece",
            origin="data.tokenizer",
            fix=how_to_add(ENGINE, "sentencepiece"),
        ) from cause
    try:
        return SentencePieceProcessor(model_proto=content)
    except (RuntimeError, OSError) as cause:
        raise no_sentencepiece(path, cause) from cause
