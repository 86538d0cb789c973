"""Files of a tokenizer's folder, and their JSON, each field of the type that it must have.

Every :class:`ValueError` names the file that is broken, and the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_run.files.foreign_file import followed, read_file
from megatron_run.files.safe_folder import parse_json
from megatron_run_engine.data.tokenizer_folder.folder_files import LARGEST
from megatron_run_engine.data.tokenizer_folder.record import MODEL_CONFIG, TOKENIZER, TOKENIZER_CONFIG

#: How a type of JSON is called.
_TITLES: Mapping[type, str] = {dict: "object", list: "list", str: "text"}
#: The types of fields that are read, by file. A field may be absent or null.
_FIELDS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    TOKENIZER: {
        "added_tokens": (list,),
        **dict.fromkeys(("padding", "normalizer", "pre_tokenizer", "model", "decoder"), (dict,)),
    },
    TOKENIZER_CONFIG: {
        "tokenizer_class": (str,),
        "added_tokens_decoder": (dict,),
        **dict.fromkeys(("additional_special_tokens", "extra_special_tokens"), (list, dict)),
    },
    MODEL_CONFIG: {"model_type": (str,), "tokenizer_class": (str,)},
}


def read_text(folder: Path, name: str) -> str | None:
    """The file ``name`` of ``folder``, None without it; the files of a cache are links."""
    if not (folder / name).exists():
        return None
    content = read_file(followed(folder, name), LARGEST)
    try:
        return content.decode()
    except UnicodeDecodeError as cause:
        raise ValueError(f"{name} is not UTF-8 at byte {cause.start}") from cause


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in the file ``name`` of ``folder``, empty without it; ``_FIELDS`` have their types."""
    content = read_text(folder, name)
    try:
        found = {} if content is None else parse_json(content)
    except ValueError as cause:
        raise ValueError(f"{name}: {cause}") from cause
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no JSON object")  # noqa: TRY004  # of the file
    for field, kinds in _FIELDS.get(name, {}).items():
        if found.get(field) is not None and not isinstance(found[field], kinds):
            raise ValueError(f"{name} says {field}, which is no {' or '.join(_TITLES[kind] for kind in kinds)}")
    return found
