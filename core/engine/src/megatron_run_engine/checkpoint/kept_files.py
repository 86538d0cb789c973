"""Files that travel with weights beside their checkpoints: the tokenizer that they were trained with, and their source.

A run keeps the files of its tokenizer under fixed names, and each step records their SHA-256. So a step knows its
tokenizer wherever its folder goes, and notices another file in its place. What an import has kept of its source is
handed on to every run that starts from it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_run.errors import CheckpointError, DataError
from megatron_run.files.safe_folder import SafeFolder
from megatron_run_engine.checkpoint.manifest import TokenizerRecord
from megatron_run_engine.data.standalone_tokenizer import KEPT, standalone_files
from megatron_run_engine.data.tokenizer_folder.record import DECIDING, TOKENIZER, WRITTEN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_run_engine.checkpoint.manifest import About

#: The folder of files that travel unread.
SOURCE = "source"
#: The folder of tokenizers that a run had before, each by the first digits of its SHA-256.
OLDER, _DIGITS = "tokenizers", 16


class TokenizerFiles(NamedTuple):
    """The files of a tokenizer: the ``record`` of a step, and the ``contents`` by the names of the kept files."""

    record: TokenizerRecord
    contents: Mapping[str, bytes]

    @property
    def name(self) -> str:
        """The name of the file that has the vocabulary."""
        return _own(self.contents)


def tokenizer_files(
    place: Path, end: int | None = None, *, configured: str | None = None, template: str | None = None
) -> TokenizerFiles:
    """The files that are kept of the tokenizer in the file or folder ``place``: files that say all of it by themselves.

    ``end`` is the token that ended the documents of a run, ``configured`` the user's name for the tokenizer where
    ``place`` is a copy of it, ``template`` what rendered its conversations, None for the tokenizer's own. Raises
    :class:`DataError`, and OSError for what is not read.
    """
    contents = standalone_files(place, template)
    sha256, files = _hashes(contents)
    return TokenizerFiles(TokenizerRecord(name=configured or str(place), sha256=sha256, files=files, end=end), contents)


def _hashes(contents: Mapping[str, bytes]) -> tuple[str, dict[str, str]]:
    """The SHA-256 of the file that has the vocabulary, and those of the others by their names."""
    hashes = {name: _sha256(content) for name, content in contents.items()}
    return hashes.pop(_own(contents)), hashes


def _own(files: Mapping[str, bytes]) -> str:
    return next(name for name in KEPT if name in files)


def _kept_name(home: Path, record: TokenizerRecord | None) -> str:
    """The name under which the recorded tokenizer is kept in ``home``, or would be."""
    there = [name for name in KEPT if os.path.lexists(home / name)]
    if record is not None:
        same = [name for name in there if _sha256(read_own(home, name) or b"") == record.sha256]
        there = [*same, *(name for name in KEPT if Path(name).suffix == Path(record.name).suffix), *there]
    return next(iter(there), TOKENIZER)


def keep_tokenizer(files: TokenizerFiles, home: Path) -> None:
    """Make ``files`` the tokenizer of the run at ``home``. Another one stays in a folder, for steps that have it."""
    folder = SafeFolder(home)
    old = {name: content for name in (*KEPT, *WRITTEN) if (content := read_own(home, name)) is not None}
    if any(name in old for name in KEPT) and old != files.contents:
        place = f"{OLDER}/{_hashes(old)[0][:_DIGITS]}"
        folder.make(place)
        for name, content in old.items():
            folder.replace(f"{place}/{name}", content)
    for name in (*KEPT, *WRITTEN):
        content = files.contents.get(name)
        if content is None:
            folder.remove(name)
        elif read_own(home, name) != content:
            folder.replace(name, content)


def keep_source(other: Path, home: Path) -> None:
    """Hand what the import or run at ``other`` has of its source on to the run at ``home``."""
    files, folder = source_files(other), SafeFolder(home)
    if files:
        folder.make(SOURCE)
    for name in files:
        content = read_own(other, f"{SOURCE}/{name}")
        if content is not None:
            folder.replace(f"{SOURCE}/{name}", content)


def source_files(home: Path) -> dict[str, Path]:
    """Files that an import has kept of its source in ``home``, which may be somebody else's: no link is followed."""
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


def kept_tokenizer(home: Path, about: About) -> Path | None:
    """The tokenizer's file beside the checkpoints in ``home``, where it is all that the step was trained with.

    None where a recorded file is missing or another one, or one lies there that was not recorded and has its say. A
    link among them is refused as :func:`read_own` does.
    """
    home = _place(home, about.tokenizer)
    return None if _fault(home, about.tokenizer) else home / _kept_name(home, about.tokenizer)


def exported_tokenizer(home: Path, about: About) -> Path | None:
    """As :func:`kept_tokenizer`, for who passes it on: None where it is lost or was never known.

    Raises :class:`CheckpointError` where its files are there, and others than the step has recorded.
    """
    fault = _fault(_place(home, about.tokenizer), about.tokenizer)
    if fault is not None and fault.path.exists():
        what = f"the tokenizer of step {about.step} is not exported"
        raise CheckpointError(what, why=f"{fault.path} {fault.why}", fix=f"{fault.fix}, or move the tokenizer away")
    return kept_tokenizer(home, about)


def tokenizer_of(home: Path, about: About, configured: str) -> str:
    """The tokenizer with which a step of the run at ``home`` was trained, as ``data.tokenizer`` names one.

    The run's own file comes first, then the ``configured`` one if it is the same. Raises :class:`DataError` where
    neither is what the step has recorded.
    """
    record = about.tokenizer
    if record is None:
        return configured
    home = _place(home, record)
    fault = _fault(home, record)
    if fault is None:
        return str(home / _kept_name(home, record))
    if same_tokenizer(configured, record):
        return configured
    raise DataError(
        f"the tokenizer of step {about.step} is not beside it",
        why=f"{fault.path} {fault.why}: an id would mean another text",
        fix=f"{fault.fix}, or name a tokenizer: --plugin data=text,tokenizer=FILE",
    )


def is_kept(home: Path, name: str) -> bool:
    """Whether ``data.tokenizer=name`` is the tokenizer that the run at ``home`` keeps, all of its files."""
    kept = ((each, read_own(home, each)) for each in (*KEPT, *WRITTEN))
    try:
        return standalone_files(name) == {each: content for each, content in kept if content is not None}
    except (DataError, OSError):
        return False


def same_tokenizer(name: str, record: TokenizerRecord) -> bool:
    """Whether ``data.tokenizer=name`` is the recorded tokenizer, all of its files."""
    try:
        files = standalone_files(name)
    except (DataError, OSError):
        return False
    return bool(files) and _hashes(files) == (record.sha256, dict(record.files))


def _place(home: Path, record: TokenizerRecord | None) -> Path:
    """The folder of the recorded tokenizer: ``home``, or where that has put it when it got another one."""
    if record is None or _fault(home, record) is None:
        return home
    older = home / OLDER / record.sha256[:_DIGITS]
    own = older.is_dir() and not (older.is_symlink() or older.parent.is_symlink())
    return older if own and _fault(older, record) is None else home


class _Fault(NamedTuple):
    """The file ``path`` of a kept tokenizer that is not as it was."""

    path: Path
    why: str
    fix: str = "put it back"


def _fault(home: Path, record: TokenizerRecord | None) -> _Fault | None:
    """The first of the files in ``home`` that decide what ids mean and are not what the step recorded.

    Of a step without a record, any tokenizer of ours will do.
    """
    own = _kept_name(home, record)
    known = {own: record.sha256, **record.files} if record else {}
    found = {name: read_own(home, name) for name in (own, *WRITTEN, *known)}
    for name in (own, *known):
        content = found[name]
        if content is None:
            return _Fault(home / name, "is missing")
        if name in known and _sha256(content) != known[name]:
            return _Fault(home / name, "is not the file that it was")
    for name in DECIDING:
        if os.path.lexists(home / name) and name not in (known or WRITTEN):
            return _Fault(home / name, "was not there", fix="move it away")
    return None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
