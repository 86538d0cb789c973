"""What travels with weights beside their checkpoints: the tokenizer that they were trained with, and their source.

A run keeps the files of its tokenizer under fixed names, and each step records their SHA-256. So a step knows its
tokenizer wherever its folder goes, and notices another file in its place. What an import has kept of its source is
handed on to every run that starts from it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_run.errors import CheckpointError, DataError
from megatron_run.safe_folder import SafeFolder
from megatron_run_engine.checkpoint.manifest import TokenizerRecord
from megatron_run_engine.data.kept_tokenizer import KEPT, kept_files
from megatron_run_engine.data.tokenizer import BESIDE, TOKENIZER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_run_engine.checkpoint.manifest import About

#: The folder of files that travel unread.
SOURCE = "source"


class TokenizerFiles(NamedTuple):
    """The files of a tokenizer: the ``record`` of a step, and the ``contents`` by the names of the kept files."""

    record: TokenizerRecord
    contents: Mapping[str, bytes]

    @property
    def name(self) -> str:
        """The name of the file that has the vocabulary."""
        return _own(self.contents)


def tokenizer_files(place: Path, end: int | None = None) -> TokenizerFiles:
    """What is kept of the tokenizer in the file or folder ``place``: files that say all of it by themselves.

    ``end`` is the token that ended the documents of a run. Raises :class:`DataError`, and OSError for what is not read.
    """
    contents = kept_files(place)
    hashes = {name: _sha256(content) for name, content in contents.items()}
    own = _own(contents)
    record = TokenizerRecord(
        name=str(place / own if place.is_dir() else place), sha256=hashes.pop(own), files=hashes, end=end
    )
    return TokenizerFiles(record, contents)


def _own(files: Mapping[str, bytes]) -> str:
    return next(name for name in KEPT if name in files)


def _kept_name(record: TokenizerRecord) -> str:
    """The name under which the recorded tokenizer is kept."""
    return next((name for name in KEPT if Path(name).suffix == Path(record.name).suffix), TOKENIZER)


def keep_tokenizer(files: TokenizerFiles, home: Path) -> None:
    """Make ``files`` the tokenizer of the run at ``home``. What another one has left there goes."""
    folder = SafeFolder(home)
    for name in (*KEPT, *BESIDE):
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


def kept_tokenizer(home: Path, about: About) -> Path | None:
    """The tokenizer's file beside the checkpoints in ``home``, unless the step was trained with another one.

    The files beside it have their say when it is opened, so a link among them is refused as :func:`read_own` does.
    """
    record = about.tokenizer
    for name in BESIDE:
        read_own(home, name)
    for name in KEPT:
        content = read_own(home, name)
        if content is not None and (record is None or _sha256(content) == record.sha256):
            return home / name
    return None


def tokenizer_of(home: Path, about: About, configured: str) -> str:
    """The tokenizer with which a step of the run at ``home`` was trained, as ``data.tokenizer`` names one.

    The run's own file comes first, then the ``configured`` one if it is the same. Raises :class:`DataError` where
    neither is what the step has recorded.
    """
    record = about.tokenizer
    if record is None:
        return configured
    kept = kept_tokenizer(home, about)
    wrong = None if kept is None else _changed_beside(home, record)
    if kept is not None and wrong is None:
        return str(kept)
    if kept is None and same_tokenizer(configured, record.sha256):
        return configured
    lost = wrong or home / _kept_name(record)
    raise DataError(
        f"the tokenizer of step {about.step} is not beside it",
        why=f"{lost} is {'not the file that it was' if lost.exists() else 'missing'}: an id would mean another text",
        fix="put it back, or name a tokenizer: --plugin data=text,tokenizer=FILE",
    )


def is_kept(home: Path, name: str) -> bool:
    """Whether ``data.tokenizer=name`` is the file that the run at ``home`` keeps."""
    kept = (content for content in (read_own(home, each) for each in KEPT) if content is not None)
    return any(same_tokenizer(name, _sha256(content)) for content in kept)


def same_tokenizer(name: str, sha256: str) -> bool:
    """Whether ``data.tokenizer=name`` is the file with this hash."""
    try:
        files = kept_files(name)
        return bool(files) and _sha256(files[_own(files)]) == sha256
    except (DataError, OSError):
        return False


def _changed_beside(home: Path, record: TokenizerRecord) -> Path | None:
    """The first file beside the tokenizer that is not the recorded one."""
    for name, sha256 in record.files.items():
        content = read_own(home, name)
        if content is None or _sha256(content) != sha256:
            return home / name
    return None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
