"""Tokenizers as files that say all of it by themselves, which runs, imports and exports keep beside their weights."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron_run.files.user_cache import keep, user_cache
from megatron_run_engine.data.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron_run_engine.data.tokenizer import (
    END_OF_DOCUMENT,
    JsonTokenizer,
    byte_characters,
    open_tokenizer,
)
from megatron_run_engine.data.tokenizer_files import SENTENCEPIECE, find_file, find_tokenizer, read_tokenizer
from megatron_run_engine.data.tokenizer_folder import FolderTokenizer
from megatron_run_engine.data.tokenizer_folder.folder_files import read_tokenizer_file, template_beside
from megatron_run_engine.data.tokenizer_folder.record import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from megatron_run_engine.data.tokenizer_json import to_json

#: The names under which a tokenizer is kept, by its form.
SENTENCEPIECE_MODEL = f"tokenizer{SENTENCEPIECE}"
KEPT = (TOKENIZER, SENTENCEPIECE_MODEL)


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
    return to_json(made, pretty=True).encode()


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


def standalone_files(name: str | Path, template: str | None = None) -> dict[str, bytes]:
    """The tokenizer ``name`` as files that say all of it by themselves, by their names: one of ``KEPT`` and others.

    ``template`` renders its conversations, if it is not None, instead of what comes with it. Empty for bytes, which
    need none. Raises :class:`DataError`.
    """
    if str(name) == "bytes":
        return {}
    path, folder = find_tokenizer(Path(name).expanduser())
    if folder is not None:
        return folder.rendering(template).files()
    if path.suffix == SENTENCEPIECE:
        rendering = template_beside(path) if template is None else template.encode()
        files = {SENTENCEPIECE_MODEL: read_tokenizer_file(path)}
        return files if rendering is None else {**files, CHAT_TEMPLATE: rendering}
    derived = path.name.endswith((".txt", "vocab.json"))
    content = to_json(read_tokenizer(path)).encode() if derived else read_tokenizer_file(path)
    return {TOKENIZER: content} if template is None else _as_folder(name, content).rendering(template).files()


def files_for_transformers(name: str | Path, end: int | None = None) -> dict[str, bytes]:
    """The :func:`standalone_files`, with a ``tokenizer_config.json`` by which transformers takes the other as it is.

    It would choose a class by the model's type otherwise. ``end``, which ended the documents of a run, or else the
    tokenizer's own end is its ``eos_token`` where that changes no id. Bytes have files too.
    """
    if str(name) == "bytes":
        return FolderTokenizer(byte_tokenizer_json().decode(), {"eos_token": END_OF_DOCUMENT[0]}).files()
    files = standalone_files(name)
    if TOKENIZER not in files or TOKENIZER_CONFIG in files:
        return files
    return _as_folder(name, files[TOKENIZER], end).files()


def _as_folder(name: str | Path, content: bytes, end: int | None = None) -> FolderTokenizer:
    """The tokenizer ``name``, whose file of ``content`` says all of it, as a folder that names its end."""
    tokenizer = open_tokenizer(str(name))
    assert isinstance(tokenizer, JsonTokenizer), "it has files"
    return FolderTokenizer(content.decode(), tokenizer.plain_special(end))


def json_file(name: str) -> Path | None:
    """Return the JSON file of the tokenizer ``name``: in the user's cache where it, or what is beside it, differs.

    The other :func:`standalone_files` lie beside it. A SentencePiece model is returned itself. None for
    bytes, and without a cache.
    """
    files = standalone_files(name)
    if not files:
        return None
    path = find_file(Path(name).expanduser())
    if SENTENCEPIECE_MODEL in files:
        return path
    there = {beside: path if beside == TOKENIZER else path.with_name(beside) for beside in files}
    if all(place.is_file() and read_tokenizer_file(place) == files[beside] for beside, place in there.items()):
        return path
    try:
        total = sha256(repr(sorted(files.items())).encode()).hexdigest()[:32]
        converted = user_cache("tokenizers") / total
        converted.mkdir(exist_ok=True)
        for beside, content in files.items():
            keep(converted / beside, content)
    except OSError:
        return None
    return converted / TOKENIZER
