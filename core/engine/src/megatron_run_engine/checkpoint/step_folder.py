"""The folder of a run's checkpoints: finds steps and the newest one, and verifies their files.

A step is committed once its folder has its final name. The file ``latest`` is a hint for people and scripts; only a
valid manifest proves that a step is whole.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import xxhash

from megatron_run.errors import CheckpointError
from megatron_run.errors.wording import advice, from_hub, near_path
from megatron_run.files.latest_run import DEFAULT_RUN, follow_latest
from megatron_run_engine.checkpoint.files import blocks, hash_of, no_heartbeat, reading, size_of
from megatron_run_engine.checkpoint.manifest import MANIFEST, Manifest, read_manifest

#: The name of the checkpoints' folder in a run folder.
CHECKPOINTS = "checkpoints"
#: What the manifest of an imported step calls its run.
IMPORTED = "imported"
#: The name of the hint, a text file that holds the name of the newest step.
LATEST_STEP = "latest"
_STEP = re.compile(r"step(0|[1-9][0-9]{0,17})")


class Checkpoints:
    """The steps saved under ``path``, which need not exist, of the run in the folder ``home``, by default around it."""

    def __init__(self, path: Path, home: Path | None = None) -> None:
        self.path = path
        self.home = path.parent if home is None else home

    def folder(self, step: int) -> Path:
        """Return the folder of ``step``."""
        return self.path / f"step{step}"

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)

    def hint(self) -> int | None:
        """Return the step that ``latest`` names; None if the file is missing or names no step."""
        try:
            with reading(self.path / LATEST_STEP) as file:
                match = _STEP.fullmatch(file.read(100).decode(errors="replace").strip())
        except CheckpointError:
            return None
        return int(match[1]) if match else None

    def newest(self) -> int | None:
        """Return the newest committed step, None if there is none.

        Raises :class:`CheckpointError` if ``latest`` names a newer step, which is then lost. Resuming from an older
        one would silently repeat work: the user decides that.
        """
        steps, hint = self.steps(), self.hint()
        newest = steps[-1] if steps else None
        if hint is not None and (newest is None or hint > newest):
            fix = f"to resume from step {newest}: --resume {newest}" if steps else "to start again: --resume never"
            raise CheckpointError(
                f"{self.folder(hint)} is missing", why=f"{self.path / LATEST_STEP} says that it was saved", fix=fix
            )
        return newest

    def select(self, choice: str) -> int | None:
        """Return the step that ``--resume`` selects: ``auto`` the newest, ``never`` None, else the step's number.

        Raises as :meth:`newest` does.
        """
        if choice == "never":
            return None
        return self.newest() if choice == "auto" else int(choice)

    def find(self, step: int) -> Path:
        """Return the folder of ``step``. Raises :class:`CheckpointError` with the saved steps if it is missing."""
        folder = self.folder(step)
        if folder.is_symlink() or not folder.is_dir():
            saved = ", ".join(map(str, self.steps()))
            raise CheckpointError(
                f"there is no checkpoint {folder}", fix=f"saved steps: {saved}" if saved else "no step is saved there"
            )
        return folder

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of ``step``. Raises :class:`CheckpointError`."""
        folder = self.find(step)
        manifest = read_manifest(folder)
        if manifest.about.step != step:
            raise CheckpointError(f"{folder} is not what its name says", why=f"it holds step {manifest.about.step}")
        return manifest

    def looks_whole(self, step: int) -> bool:
        """Whether the manifest is valid and every file has its length. Contents are not read."""
        try:
            manifest = self.manifest(step)
            for name in manifest.files:
                check_length(self.folder(step), name, manifest)
        except CheckpointError:
            return False
        return True

    def verify(self, step: int, watch: Callable[[int, int], None] | None = None) -> Manifest:
        """Verify the SHA-256 of all files of ``step``; ``watch`` is told how many MB are done, and of how many.

        Raises :class:`CheckpointError` naming the first damaged one.
        """
        manifest = self.manifest(step)
        total, done = sum(blocks(record.bytes) for record in manifest.files.values()), count(1)
        size = -(-manifest.size // 10**6)

        def heartbeat() -> None:
            if watch is not None:
                watch(min(size, next(done) * size // max(1, total)), size)

        verify_files(self.folder(step), manifest, manifest.files, heartbeat=heartbeat)
        return manifest

    @contextmanager
    def offering_older(self, step: int, how: Callable[[int], str], otherwise: str = "") -> Iterator[None]:
        """Add advice to a :class:`CheckpointError` about ``step`` from within the block.

        The advice is ``how`` to load the newest older step that looks whole, or ``otherwise`` if there is none. No
        older step is ever loaded without the user's word.
        """
        try:
            yield
        except CheckpointError as error:
            older = next((each for each in reversed(self.steps()) if each < step and self.looks_whole(each)), None)
            error.fix = error.fix or (otherwise if older is None else how(older))
            raise


def find_checkpoints(path: Path | None) -> tuple[Checkpoints, int | None]:
    """Return the checkpoints at ``path`` and, if ``path`` is the folder of one step, its number.

    ``path`` is a run folder, its checkpoints, or one step; None means the latest run. Raises :class:`CheckpointError`
    if there are no checkpoints.
    """
    named = DEFAULT_RUN if path is None else path
    start = follow_latest(named)
    if (start / MANIFEST).is_file():
        siblings = Checkpoints(start.absolute().parent)
        step = next((step for step in siblings.steps() if siblings.folder(step) == start.absolute()), None)
        if step is not None:
            return siblings, step
    for candidate in (start / CHECKPOINTS, start):
        found = Checkpoints(candidate)
        if found.steps():
            return found, None
    if match := _STEP.fullmatch(start.name):
        Checkpoints(start.parent).find(int(match[1]))  # raises with the steps that are there
    newest, there = _newest_beside(start), start.exists()
    absent = f"{named} names it, and it is gone" if start != named else "there is no such folder"
    raise CheckpointError(
        f"no checkpoints in {start}",
        why="no step is saved there" if there else absent,
        fix=near_path(start)
        or advice(
            "name a run folder, its checkpoints, or one of its steps",
            f"{newest} is the newest beside it with a saved step" if newest else "",
            "" if there else from_hub(start, saved_steps=True),
        ),
    )


def _newest_beside(start: Path) -> Path | None:
    """The folder beside ``start`` that was changed last of those with a saved step."""
    try:
        beside = [each for each in start.parent.iterdir() if each.is_dir() and not each.is_symlink()]
        return max((each for each in beside if Checkpoints(each / CHECKPOINTS).steps()), key=_changed, default=None)
    except OSError:
        return None


def _changed(folder: Path) -> float:
    return folder.stat().st_mtime


def find_step(path: Path | None, step: int | None = None) -> tuple[Checkpoints, int]:
    """Return the checkpoints at ``path`` as :func:`find_checkpoints` does, and a step.

    It is ``step`` if given, else the step that ``path`` names, else the newest. Raises :class:`CheckpointError` if
    there are no checkpoints.
    """
    checkpoints, named = find_checkpoints(path)
    return checkpoints, next(each for each in (step, named, checkpoints.steps()[-1]) if each is not None)


def verify_files(
    folder: Path,
    manifest: Manifest,
    names: Iterable[str],
    threads: int = 1,
    heartbeat: Callable[[], None] = no_heartbeat,
    *,
    fast: bool = False,
) -> None:
    """Verify the SHA-256 of files, ``threads`` at once. Each calls ``heartbeat`` after every block.

    ``fast`` compares their 128-bit XXH3 instead, where it was saved: it finds any damage that is not made on purpose,
    and is as fast as the file is read. Raises :class:`CheckpointError` naming the first file that differs.
    """
    verify = partial(_verify_file, folder, manifest, heartbeat=heartbeat, fast=fast)
    if threads == 1:  # in the caller's own thread, from which a notebook takes what is shown
        for name in names:
            verify(name)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(verify, names):
            pass


def _verify_file(folder: Path, manifest: Manifest, name: str, heartbeat: Callable[[], None], *, fast: bool) -> None:
    check_length(folder, name, manifest)
    record = manifest.files[name]
    with reading(folder / name) as file:
        if fast and record.xxh3 is not None:
            called, same = "XXH3", hash_of(file, xxhash.xxh3_128(), heartbeat) == record.xxh3
        else:
            called, same = "SHA-256", hash_of(file, hashlib.sha256(), heartbeat) == record.sha256
    if not same:
        raise CheckpointError(f"{folder / name} is damaged", why=f"its {called} is not that of the manifest")


def check_length(folder: Path, name: str, manifest: Manifest) -> None:
    """Raise :class:`CheckpointError` if a file is missing or its length is not the manifest's."""
    with reading(folder / name) as file:
        size, expected = size_of(file), manifest.files[name].bytes
    if size != expected:
        raise CheckpointError(f"{folder / name} is damaged", why=f"it has {size} bytes, the manifest says {expected}")
