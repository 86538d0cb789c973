"""How texts of a model are written, and where they end: what its folder says beside its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_run.errors import CheckpointError
from megatron_run.files.safe_folder import parse_json
from megatron_run_engine.checkpoint.files import followed, read_whole

#: The files that say it, the first that exists alone, as in transformers.
_FILES = ("generation_config.json", "config.json")
_KEY = "eos_token_id"
#: What they say of a token's choice, by the names of :class:`~megatron_run_engine.runtime.generation.Sampling`.
_SAMPLING = ("repetition_penalty", "top_k", "top_p")


def end_tokens(folder: Path) -> tuple[int, ...] | None:
    """Every token at which transformers ends a text of the model in ``folder``; None where no file says any.

    It is the ``eos_token_id`` of ``generation_config.json`` or, without that file, of ``config.json``: an id or a list.
    Raises :class:`CheckpointError` for a file that is broken.
    """
    path, found = _read(folder)
    said = found.get(_KEY)
    ends = said if isinstance(said, list) else [] if said is None else [said]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ends):
        raise CheckpointError(f"{path} cannot be used", why=f"{_KEY} is {said!r}, and must be an id or a list of ids")
    return tuple(ends) or None


def sampling_defaults(folder: Path) -> dict[str, float]:
    """The penalty, ``top_k`` and ``top_p`` with which transformers writes texts, as far as ``folder`` says them.

    Raises :class:`CheckpointError` for a file that is broken.
    """
    path, found = _read(folder)
    said = {key: found[key] for key in _SAMPLING if found.get(key) is not None}
    for key, value in said.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise CheckpointError(f"{path} cannot be used", why=f"{key} is {value!r}, and must be a number")
    return said


def _read(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """The first of the files and what it holds; None and nothing without one."""
    path = next((path for path in map(folder.joinpath, _FILES) if path.is_file()), None)
    if path is None:
        return None, {}
    try:
        found = parse_json(read_whole(followed(path)))
    except ValueError as cause:
        raise CheckpointError(f"{path} cannot be used", why=" ".join(str(cause).split())) from cause
    return path, found if isinstance(found, dict) else {}
