"""A folder as transformers' AutoTokenizer reads it, without running a program of the folder or asking a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_run_engine.data.tokenizer_folder.record import DEFAULT, FolderTokenizer
from megatron_run_engine.data.tokenizer_json import to_json


def read_by_transformers(folder: Path) -> FolderTokenizer:
    """The tokenizer of ``folder``. Raises what transformers does, and :class:`ValueError` for a form without JSON."""
    import tokenizers
    from transformers import AutoTokenizer

    with _silent():
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    backend = getattr(found, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError(f"its class {type(found).__name__} has no form of the library tokenizers")  # noqa: TRY004  # of the folder
    backend.no_truncation()
    backend.no_padding()
    cleans = bool(getattr(found, "clean_up_tokenization_spaces", False))
    forced = getattr(found, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    bpe = type(backend.model).__name__ == "BPE"
    return FolderTokenizer(
        backend=to_json(backend),
        special={key: str(value) for key, value in found.special_tokens_map.items() if not isinstance(value, list)},
        templates=dict(_templates(found.chat_template)),
        splits_special=bool(getattr(found, "split_special_tokens", False)),
        cleans_up=cleans and (not bpe or bool(forced)),
    )


def _templates(found: Any) -> Iterator[tuple[str, str]]:
    if isinstance(found, str):
        yield DEFAULT, found
    elif isinstance(found, Mapping):
        yield from ((str(name), str(text)) for name, text in found.items())


@contextmanager
def _silent() -> Iterator[None]:
    """Within: transformers logs errors alone, since what it warns of (lengths, versions) is not what is read here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
