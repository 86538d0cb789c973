"""What an export takes of the files that are kept beside weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.kept_files import kept_tokenizer, read_own, source_files
from megatron_run_engine.data.tokenizer import (
    BESIDE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ByteTokenizer,
    byte_tokenizer_json,
    open_tokenizer,
    reads_bytes,
)

if TYPE_CHECKING:
    from megatron_run.contracts import Weights
    from megatron_run_engine.checkpoint.manifest import Manifest
    from megatron_run_engine.checkpoint.step_folder import Checkpoints


def files_beside(weights: Weights, checkpoints: Checkpoints, step: int) -> Iterator[tuple[str, bytes]]:
    """The tokenizer's file for another program, where one is known, and those that hold its chat template."""
    if weights.tokenizer is None:
        if reads_bytes(checkpoints.manifest(step).about.identity):
            yield TOKENIZER, byte_tokenizer_json()
        return
    for name in (weights.tokenizer.name, *BESIDE):
        content = read_own(checkpoints.path.parent, name)
        if content is not None:
            yield name, content


def files_of(home: Path, tokenizer: Path | None) -> dict[str, Path]:
    """Files that come back in an export: those of the source, and before them the tokenizer's own."""
    own = [] if tokenizer is None else [home / name for name in BESIDE if read_own(home, name) is not None]
    return source_files(home) | {path.name: path for path in own}


def special_tokens(checkpoints: Checkpoints, manifest: Manifest) -> dict[str, int]:
    """The ids that begin (``bos``), end (``eos``) and fill (``pad``) a text, as far as the kept tokenizer tells.

    ``tokenizer_config.json`` names them. Without an ``eos`` of its own, texts end with the token that ended the run's
    documents.
    """
    home = checkpoints.path.parent
    kept = kept_tokenizer(home, manifest.about)
    if kept is None:
        return {"eos": ByteTokenizer.end_of_document} if reads_bytes(manifest.about.identity) else {}
    opened = open_tokenizer(str(kept))
    vocabulary = opened.vocabulary
    content = read_own(home, TOKENIZER_CONFIG)
    try:
        said = json.loads(content or b"{}")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{home / TOKENIZER_CONFIG} cannot be used", why=f"it is no JSON: {error}") from error
    named = said if isinstance(said, dict) else {}
    names = {kind: _text_of(named.get(f"{kind}_token")) for kind in ("bos", "eos", "pad")}
    found = {kind: vocabulary[name] for kind, name in names.items() if isinstance(name, str) and name in vocabulary}
    recorded = None if manifest.about.tokenizer is None else manifest.about.tokenizer.end
    end = opened.end_of_document if recorded is None else recorded
    return {"eos": end, **found} if end in vocabulary.values() else found


def _text_of(token: Any) -> Any:
    """The text of a special token, which may be kept with options."""
    return token.get("content") if isinstance(token, dict) else token
