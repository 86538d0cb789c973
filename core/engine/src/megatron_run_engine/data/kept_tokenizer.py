"""Tokenizers as files that say all of it by themselves, which runs, imports and exports keep beside their weights."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron_run_engine.data.tokenizer import (
    END_OF_DOCUMENT,
    TOKENIZER,
    TOKENIZER_CONFIG,
    JsonTokenizer,
    open_tokenizer,
)
from megatron_run_engine.data.tokenizer_files import SENTENCEPIECE, find_file, find_tokenizer, read_tokenizer
from megatron_run_engine.data.tokenizer_folder import FolderTokenizer
from megatron_run_engine.data.user_cache import replacing, user_cache


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
    """Whether the data of a run, by the keys of its ``identity``, is read byte by byte, whichever source reads it."""
    return identity.get("data.tokenizer") == "bytes"


def same_vocabulary(first: Path | None, second: Path | None) -> bool:
    """Whether two files, or bytes where there is None, give every token the same id. Raises :class:`DataError`."""
    return first == second or _vocabulary(first) == _vocabulary(second)


def _vocabulary(file: Path | None) -> Mapping[str, int]:
    import tokenizers

    opened = tokenizers.Tokenizer.from_buffer(byte_tokenizer_json()) if file is None else read_tokenizer(file)
    return opened.get_vocab(with_added_tokens=True)


def kept_files(name: str | Path) -> dict[str, bytes]:
    """The tokenizer ``name`` as files that say all of it by themselves, by their names: ``tokenizer.json`` and others.

    Empty for bytes and for a SentencePiece model, which have no such form. Raises :class:`DataError`.
    """
    if str(name) == "bytes":
        return {}
    path, folder = find_tokenizer(Path(name).expanduser())
    if folder is not None:
        return folder.files()
    if path.suffix == SENTENCEPIECE:
        return {}
    if path.name.endswith((".txt", "vocab.json")):
        return {TOKENIZER: read_tokenizer(path).to_str().encode()}
    return {TOKENIZER: path.read_bytes()}


def exported_files(name: str | Path) -> dict[str, bytes]:
    """The :func:`kept_files`, and a ``tokenizer_config.json`` by which transformers takes ``tokenizer.json`` as it is.

    It would choose a class by the model's type otherwise. The end of a document is its ``eos_token`` where that changes
    no id.
    """
    files = kept_files(name)
    if not files or TOKENIZER_CONFIG in files:
        return files
    tokenizer = open_tokenizer(str(name))
    assert isinstance(tokenizer, JsonTokenizer), "it has files"
    return FolderTokenizer(files[TOKENIZER].decode(), tokenizer.plain_special()).files()


def json_file(name: str) -> Path | None:
    """Return the JSON file of the tokenizer ``name``: in the user's cache where it, or what is beside it, differs.

    The other :func:`kept_files` lie beside it. None for bytes and for SentencePiece, and without a cache.
    """
    files = kept_files(name)
    if not files:
        return None
    path = find_file(Path(name).expanduser())
    there = {beside: path if beside == TOKENIZER else path.with_name(beside) for beside in files}
    if all(place.is_file() and place.read_bytes() == files[beside] for beside, place in there.items()):
        return path
    try:
        total = sha256(repr(sorted(files.items())).encode()).hexdigest()[:32]
        converted = user_cache("tokenizers") / total
        converted.mkdir(exist_ok=True)
        for beside, content in files.items():
            with replacing(converted / beside) as file:
                file.write(content)
    except OSError:
        return None
    return converted / TOKENIZER
