"""The files kept beside weights that an export takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_run_engine.checkpoint.files import followed
from megatron_run_engine.checkpoint.kept_files import TokenizerFiles, kept_tokenizer, tokenizer_files
from megatron_run_engine.data.standalone_tokenizer import files_for_transformers, reads_bytes
from megatron_run_engine.data.tokenizer import ByteTokenizer, open_tokenizer

if TYPE_CHECKING:
    from megatron_run.contracts import Weights
    from megatron_run_engine.checkpoint.manifest import Manifest
    from megatron_run_engine.checkpoint.step_folder import Checkpoints


def files_beside(weights: Weights, checkpoints: Checkpoints, step: int) -> Iterator[tuple[str, bytes]]:
    """The tokenizer's files for another program, where one is known, with its chat template."""
    about = checkpoints.manifest(step).about
    if weights.tokenizer is not None:
        end = None if about.tokenizer is None else about.tokenizer.end
        yield from files_for_transformers(weights.tokenizer, end).items()
    elif reads_bytes(about.identity):
        yield from files_for_transformers("bytes").items()


def given_tokenizer(weights: Weights) -> TokenizerFiles | None:
    """The tokenizer of a source, as files that say all of it by themselves; None without it.

    Raises :class:`CheckpointError` for a file from elsewhere or too large, :class:`DataError` for what is not read.
    """
    if weights.tokenizer is None:
        return None
    if weights.tokenizer.is_file():
        followed(weights.tokenizer)
    return tokenizer_files(weights.tokenizer)


def special_tokens(checkpoints: Checkpoints, manifest: Manifest) -> dict[str, int]:
    """The ids that begin (``bos``), end (``eos``) and fill (``pad``) a text, as far as the kept tokenizer tells.

    Without an ``eos`` of its own, texts end with the token that ended the run's documents.
    """
    kept = kept_tokenizer(checkpoints.path.parent, manifest.about)
    if kept is None:
        return {"eos": ByteTokenizer.end_of_document} if reads_bytes(manifest.about.identity) else {}
    recorded = manifest.about.tokenizer
    return open_tokenizer(str(kept)).special_ids(None if recorded is None else recorded.end)
