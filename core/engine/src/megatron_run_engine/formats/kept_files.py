"""What lies beside the weights of a run or an import: its tokenizer's files, and those of its source."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_run.errors import CheckpointError
from megatron_run.safe_folder import SafeFolder
from megatron_run_engine.checkpoint.files import followed
from megatron_run_engine.data.kept_tokenizer import byte_tokenizer_json, exported_files, kept_files, reads_bytes
from megatron_run_engine.data.tokenizer import (
    CHAT_TEMPLATES,
    TOKENIZER,
    ByteTokenizer,
    open_tokenizer,
)
from megatron_run_engine.data.tokenizer_folder import read_files

if TYPE_CHECKING:
    from megatron_run.contracts import Weights
    from megatron_run_engine.checkpoint.manifest import Manifest
    from megatron_run_engine.checkpoint.step_folder import Checkpoints

#: The folder of files that travel unread.
SOURCE = "source"


def source_files(home: Path) -> dict[str, Path]:
    """What an import has kept of its source in ``home``, which may be somebody else's: no link is followed."""
    paths = [path for path in (home / SOURCE).glob("*") if path.is_symlink() or path.is_file()]
    for path in paths:
        read_own(home, f"{SOURCE}/{path.name}")
    return {path.name: path for path in paths}


def read_own(home: Path, name: str) -> bytes | None:
    """The file ``name`` of a run or an import, None if it is absent. Raises :class:`CheckpointError` for a link."""
    try:
        return SafeFolder(home).read(name)
    except FileNotFoundError:
        return None
    except OSError as error:
        why, fix = error.strerror or str(error), "put the file itself there, or remove it"
        raise CheckpointError(f"{error.filename or home / name} is not read", why=why, fix=fix) from error


def kept_tokenizer(checkpoints: Checkpoints, manifest: Manifest) -> Path | None:
    """The tokenizer's file beside the checkpoints, unless the step was trained with another one."""
    path, record = checkpoints.path.parent / TOKENIZER, manifest.about.tokenizer
    content = read_own(path.parent, TOKENIZER)
    if content is None or (record and hashlib.sha256(content).hexdigest() != record.sha256):
        return None
    return path


def files_beside(weights: Weights, checkpoints: Checkpoints, step: int) -> Iterator[tuple[str, bytes]]:
    """The tokenizer's file for another program, where one is known, and those that hold its chat template."""
    if weights.tokenizer is None:
        if reads_bytes(checkpoints.manifest(step).about.identity):
            yield TOKENIZER, byte_tokenizer_json()
        return
    for name in (TOKENIZER, *CHAT_TEMPLATES):  # no link of somebody else's run is followed
        read_own(checkpoints.path.parent, name)
    yield from exported_files(weights.tokenizer).items()


def tokenizer_files(weights: Weights) -> dict[str, bytes]:
    """The tokenizer of a source, as files that say all of it by themselves; none without it.

    Raises :class:`CheckpointError` for a file from elsewhere or too large, :class:`DataError` for what is not read.
    """
    if weights.tokenizer is None:
        return {}
    folder = weights.tokenizer if weights.tokenizer.is_dir() else weights.tokenizer.parent
    for path in {weights.tokenizer, *read_files(folder)} - {folder}:
        followed(path)
    return kept_files(weights.tokenizer)


def special_tokens(checkpoints: Checkpoints, manifest: Manifest) -> dict[str, int]:
    """The ids that begin (``bos``), end (``eos``) and fill (``pad``) a text, as far as the kept tokenizer tells.

    Without an ``eos`` of its own, texts end with the token that ended the run's documents.
    """
    file = kept_tokenizer(checkpoints, manifest)
    if file is not None:
        return open_tokenizer(str(file)).special_ids()
    return {"eos": ByteTokenizer.end_of_document} if reads_bytes(manifest.about.identity) else {}
