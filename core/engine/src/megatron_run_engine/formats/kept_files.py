"""What lies beside the weights of a run or an import: its tokenizer's files, and those of its source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.errors import CheckpointError
from megatron_run.safe_folder import SafeFolder
from megatron_run_engine.data.tokenizer import (
    CHAT_TEMPLATES,
    END_OF_DOCUMENT,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ByteTokenizer,
    byte_tokenizer_json,
    reads_bytes,
)
from megatron_run_engine.data.tokenizer_files import read_tokenizer

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
    for name in (TOKENIZER, *CHAT_TEMPLATES):
        content = read_own(checkpoints.path.parent, name)
        if content is not None:
            yield name, content


def chat_templates(weights: Weights) -> list[Path]:
    """The files beside the tokenizer of a source that hold its chat template."""
    if weights.tokenizer is None:
        return []
    return [path for path in map(weights.tokenizer.with_name, CHAT_TEMPLATES) if path.is_file()]


def special_tokens(checkpoints: Checkpoints, manifest: Manifest) -> dict[str, int]:
    """The ids that begin (``bos``), end (``eos``) and fill (``pad``) a text, as far as the kept tokenizer tells.

    ``tokenizer_config.json`` names them. Without an ``eos`` of its own, texts end with the token that ended the run's
    documents.
    """
    if kept_tokenizer(checkpoints, manifest) is None:
        return {"eos": ByteTokenizer.end_of_document} if reads_bytes(manifest.about.identity) else {}
    home = checkpoints.path.parent
    vocabulary: Mapping[str, int] = read_tokenizer(home / TOKENIZER).get_vocab(with_added_tokens=True)
    content = read_own(home, TOKENIZER_CONFIG)
    try:
        said = json.loads(content or b"{}")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{home / TOKENIZER_CONFIG} cannot be used", why=f"it is no JSON: {error}") from error
    named = said if isinstance(said, dict) else {}
    names = {kind: _text_of(named.get(f"{kind}_token")) for kind in ("bos", "eos", "pad")}
    found = {kind: vocabulary[name] for kind, name in names.items() if isinstance(name, str) and name in vocabulary}
    ends = [vocabulary[name] for name in END_OF_DOCUMENT if name in vocabulary]
    return {"eos": ends[0], **found} if ends else found


def _text_of(token: Any) -> Any:
    """The text of a special token, which may be kept with options."""
    return token.get("content") if isinstance(token, dict) else token
