"""Where a text of a model ends: what its folder says beside its tokenizer."""

from __future__ import annotations

from pathlib import Path

from megatron_run.errors import CheckpointError
from megatron_run.safe_folder import parse_json
from megatron_run_engine.checkpoint.files import followed, read_whole

#: The files that say it, the first that exists alone, as in transformers.
_FILES = ("generation_config.json", "config.json")
_KEY = "eos_token_id"


def end_tokens(folder: Path) -> tuple[int, ...] | None:
    """Every token at which transformers ends a text of the model in ``folder``; None where no file says any.

    It is the ``eos_token_id`` of ``generation_config.json`` or, without that file, of ``config.json``: an id or a list.
    Raises :class:`CheckpointError` for a file that is broken.
    """
    path = next((path for path in map(folder.joinpath, _FILES) if path.is_file()), None)
    if path is None:
        return None
    content = read_whole(followed(path))
    try:
        found = parse_json(content)
        said = found.get(_KEY) if isinstance(found, dict) else None
        ends = said if isinstance(said, list) else [] if said is None else [said]
    except ValueError as cause:
        raise CheckpointError(f"{path} cannot be used", why=" ".join(str(cause).split())) from cause
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ends):
        raise CheckpointError(f"{path} cannot be used", why=f"{_KEY} is {said!r}, and must be an id or a list of ids")
    return tuple(ends) or None
