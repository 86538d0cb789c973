"""Which files of a repository are read: nothing else is fetched, and no pickle ever."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from megatron_run.errors import DataError
from megatron_run.errors.wording import plural
from megatron_run_engine.data import TOKENIZER_FILES, is_tokenizer_file
from megatron_run_format_huggingface.hub.names import HubName
from megatron_run_format_huggingface.model_folder import CONFIG, GENERATION, INDEX, PICKLED, SINGLE
from megatron_run_format_huggingface.peft import config as adapters
from megatron_run_format_huggingface.peft import matrices

#: Files of a dataset about it, which are none of its texts.
_ABOUT = ("README.md", "dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
#: What a dataset's name for the texts to train on has in it.
_TRAIN = re.compile(r"(?:^|[^a-z])train(?:$|[^a-z])")
#: So many are named in a message.
_NAMED = 6


def own(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that lie below the repository: a server may say anything."""
    return sorted(name for name in names if not {"..", ".", ""} & {*name.split("/")})


def of_model(asked: HubName, names: Collection[str]) -> list[str]:
    """The files of a model without its weights, and of its tokenizer; or adapters.

    Raises :class:`DataError` for a repository without safetensors.
    """
    if adapters.CONFIG in names and CONFIG not in names:
        if matrices.FILE not in names:
            raise _no_weights(asked, matrices.FILE, names)
        return [adapters.CONFIG, matrices.FILE]
    if CONFIG not in names:
        raise DataError(f"{asked} holds no model", why=f"it has no {CONFIG}")
    if not {SINGLE, INDEX} & {*names}:
        raise _no_weights(asked, SINGLE, names)
    beside = {CONFIG, GENERATION} if SINGLE in names else {CONFIG, GENERATION, INDEX}
    return [name for name in names if name in beside or is_tokenizer_file(name)]


def _no_weights(asked: HubName, file: str, names: Iterable[str]) -> DataError:
    pickled = [name for name in names if fnmatchcase(name, f"{PICKLED}*.bin") or name == "adapter_model.bin"]
    why = f"{pickled[0]} is a pickle, which could execute anything; nothing of it was fetched" if pickled else ""
    fix = "look for a revision or a copy of the model in safetensors"
    return DataError(f"{asked} has no {file}", why=why, fix=fix)


def of_tokenizer(asked: HubName, names: Iterable[str]) -> list[str]:
    """The files of a tokenizer. Raises :class:`DataError` where there is none."""
    found = [name for name in names if is_tokenizer_file(name)]
    if not {*TOKENIZER_FILES} & {*found}:
        raise DataError(f"{asked} holds no tokenizer", why=f"it would have one of {', '.join(TOKENIZER_FILES)}")
    return found


def of_dataset(
    asked: HubName, names: Iterable[str], is_read: Callable[[str], bool], tell: Callable[[str], None]
) -> list[str]:
    """The files of a dataset that ``is_read`` says can be read: those ``inside``, else those to train on.

    Raises :class:`DataError` where there are none, and where they lie in several folders: those may be parts that do
    not belong together, as languages, or each the whole in another form.
    """
    texts = [name for name in names if is_read(name) and PurePosixPath(name).name not in _ABOUT]
    if asked.inside:
        place = asked.inside.rstrip("/")
        found = [name for name in texts if name.startswith(f"{place}/") or fnmatchcase(name, place)]
        if not found:
            raise DataError(f"{asked} matches no file that is read", fix=f"there are {_some(texts)}")
        return found
    found = [name for name in texts if _TRAIN.search(name.lower())] or texts
    if not found:
        raise DataError(f"{asked} holds no texts in a form that is read", fix=f"there are {_some(names)}")
    folders = sorted({str(PurePosixPath(name).parent) for name in found})
    if len(folders) > 1:
        raise DataError(
            f"{asked} has texts in {len(folders)} folders: {_some(folders)}",
            why="not all of it may belong together",
            fix=f"say which: {asked}/{next(each for each in folders if each != '.')}, or {asked}/* for all",
        )
    if len(found) < len(texts):
        left = f"{plural(len(texts) - len(found), 'file')} left out: {_some(sorted({*texts} - {*found}))}"
        tell(f"of {asked} what has train in its name is read; {left}")
    return found


def _some(names: Iterable[str]) -> str:
    *first, rest = [*names][:_NAMED], len([*names]) - _NAMED
    return ", ".join(first[0]) + (f" and {rest} more" if rest > 0 else "") or "none"
