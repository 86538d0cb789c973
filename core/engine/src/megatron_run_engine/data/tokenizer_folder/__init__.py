"""A tokenizer's folder means what transformers says it means: the one place that decides it.

``tokenizer.json`` is one of many files: ``tokenizer_config.json``, ``special_tokens_map.json``, ``added_tokens.json``,
``config.json`` and ``chat_template.jinja`` decide ids, special tokens and templates with it. What needs no judgement is
read here (``exactly``); everything else by transformers' AutoTokenizer (``by_transformers``), once for the files that
the folder has, since the answer is kept in the user's cache. Without transformers the field that decides is named.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_run.errors import DataError
from megatron_run.errors.install_hint import ENGINE, how_to_add
from megatron_run.files.foreign_file import read_file
from megatron_run.files.user_cache import cached, keep
from megatron_run_engine.data.tokenizer_folder.by_transformers import read_by_transformers
from megatron_run_engine.data.tokenizer_folder.exactly import NotExact, read_exactly
from megatron_run_engine.data.tokenizer_folder.folder_files import LARGEST, key, read_files
from megatron_run_engine.data.tokenizer_folder.record import (
    BESIDE,
    DECIDING,
    MODEL_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    FolderTokenizer,
    template_for,
)

__all__ = ["FolderTokenizer", "files_decide", "read_files", "read_folder", "template_for"]

#: The libraries that transformers reads vocabularies with, itself among them: another version may read another thing.
_LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "tiktoken", "protobuf")


def files_decide(folder: Path) -> bool:
    """Whether files of ``folder`` decide together with its tokenizer's file; without any, that file says all.

    Beside files of an older form, such as ``vocab.txt``, nothing does unless it names a class: they have options alone.
    """
    if (folder / TOKENIZER).is_file():
        return any((folder / name).exists() for name in DECIDING)
    return (folder / MODEL_CONFIG).is_file() or "tokenizer_class" in _text(folder / TOKENIZER_CONFIG)


def _text(path: Path) -> str:
    """The text of a file, which may be broken; empty without it."""
    try:
        return read_file(path).decode(errors="replace")
    except OSError:
        return ""


def read_folder(folder: Path) -> FolderTokenizer | None:
    """The tokenizer of ``folder``; None where transformers has no class for it and no file decides over the others.

    Raises :class:`DataError` naming the field that decides, what transformers says, or a file that is not read.
    """
    read_files(folder)
    try:
        return read_exactly(folder)
    except NotExact as unread:
        why = str(unread)
    except (ValueError, OSError) as cause:
        raise _fault(f"the tokenizer in {folder} is broken", why=" ".join(str(cause).split())) from cause
    if _version("transformers") is None:
        what = f"the tokenizer in {folder} needs transformers"
        fix = f"{how_to_add(ENGINE, 'transformers')}, or name a file: tokenizer.json of a folder of its own"
        raise _fault(what, why=why, fix=fix)
    kept = _kept_at(folder)
    if kept is not None and kept.is_file():
        with suppress(OSError, ValueError):  # damaged: it is made again
            return FolderTokenizer.from_json(read_file(kept, LARGEST).decode())
    try:
        found = read_by_transformers(folder)
    except Exception as cause:  # its code for old forms raises anything
        if not any((folder / name).exists() for name in BESIDE):
            return None
        raise _fault(f"transformers cannot read the tokenizer in {folder}", why=_first_line(cause)) from cause
    if kept is not None:
        with suppress(OSError):
            keep(kept, found.to_json().encode())
    return found


def _kept_at(folder: Path) -> Path | None:
    """Where the answer for the files of ``folder`` is kept; None without a cache."""
    name = key(folder, (f"{library} {_version(library)}" for library in _LIBRARIES))
    return cached("tokenizers", f"{name}.folder.json")


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _first_line(cause: BaseException) -> str:
    words = " ".join(str(cause).split()) or type(cause).__name__
    return words[:200]


def _fault(what: str, *, why: str = "", fix: str = "") -> DataError:
    return DataError(what, why=why, origin="data.tokenizer", fix=fix)
