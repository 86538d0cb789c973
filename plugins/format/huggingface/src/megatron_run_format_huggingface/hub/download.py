"""From the Hub into the library's cache, and from there alone where the Hub cannot be reached."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from glob import escape
from pathlib import Path

from megatron_run.contracts import Fetched, Wanted
from megatron_run.errors.wording import plural
from megatron_run_format_huggingface.hub import failures, wanted
from megatron_run_format_huggingface.hub.names import DATASET, MODEL, HubName, at_home, parse
from megatron_run_format_huggingface.model_folder import CONFIG, file_names

Tell = Callable[[str], None]


def fetch(name: str, what: Wanted, tell: Tell, before: Path | None = None) -> Fetched:
    """The files of ``name`` that are read, in a snapshot of the library's cache: see :meth:`Format.fetch`.

    Files that came whole before a download broke off are not fetched again. Raises a RunError for each failure, which
    ``failures`` has.
    """
    asked = parse(name, DATASET if callable(what) else MODEL)
    with failures.in_one_line(asked):
        snapshot = _snapshot(asked, asked.revision or _revision(asked, before), [])  # what there is, and no file
        taken = asked._replace(revision=snapshot.name)
        sizes = _listed(taken)
        if sizes is None:
            sizes = _sizes(snapshot)
            if not sizes:  # the library goes on without a list that it could not write
                raise failures.no_room(taken)
            with failures.of_cache(taken):
                chosen = _chosen(asked, sizes, what, tell)
        else:
            chosen = _chosen(asked, sizes, what, tell)
        _get(taken, snapshot, chosen, sizes, tell)
        if what == "model" and CONFIG in chosen:
            _get(taken, snapshot, file_names(snapshot, sizes), sizes, tell)
    files = tuple(snapshot / each for each in chosen) if callable(what) else ()
    return Fetched(snapshot, str(taken), files)


def _revision(asked: HubName, before: Path | None) -> str | None:
    """The commit that ``asked`` stood for in ``before``, if that is a snapshot of it."""
    known = None if before is None else at_home(before)
    same = known is not None and (known.repository, known.kind) == (asked.repository, asked.kind)
    return known.revision if known is not None and same else None


def _snapshot(asked: HubName, revision: str | None, names: Sequence[str]) -> Path:
    """The folder of ``asked`` in the cache, once the files ``names`` are there."""
    from huggingface_hub import snapshot_download

    patterns = [escape(name) for name in names]
    with failures.bars(shown=bool(names)):
        found = snapshot_download(asked.repository, repo_type=asked.kind, revision=revision, allow_patterns=patterns)
    return Path(found)


def _chosen(asked: HubName, sizes: Mapping[str, int], what: Wanted, tell: Tell) -> list[str]:
    """The files to have, but for a model's weights."""
    names = wanted.own(sizes)
    if callable(what):
        return wanted.of_dataset(asked, names, what, tell)
    return (wanted.of_model if what == "model" else wanted.of_tokenizer)(asked, names)


def _sizes(snapshot: Path) -> Mapping[str, int]:
    """The files in ``snapshot`` with their sizes."""
    paths = (Path(folder, name) for folder, _, files in os.walk(snapshot) for name in files)
    return {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in paths if path.is_file()}


def _listed(taken: HubName) -> Mapping[str, int] | None:
    """The files of a repository at a commit with their sizes; None where the library has no list in its cache."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        listed = get_cached_repo_tree(taken.repository, repo_type=taken.kind, revision=taken.revision)
        return {each.path: each.size for each in listed}
    except CachedRepoTreeNotFoundError:
        return None


def _get(taken: HubName, snapshot: Path, names: Collection[str], sizes: Mapping[str, int], tell: Tell) -> None:
    """Have the files ``names`` in the cache; tells what is fetched."""
    absent = [name for name in names if not (snapshot / name).is_file()]
    if not absent:
        return
    size = sum(sizes.get(name, 0) for name in absent) / 1e6
    tell(f"fetching {plural(len(absent), 'file')} of {taken}, {size:,.1f} MB")
    _snapshot(taken, taken.revision, [*names])
