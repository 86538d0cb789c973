"""The folder of a run's checkpoints: which steps are there, which is the newest, and whether they are intact.

A step is committed when its folder has its final name; ``latest`` is a hint for people and scripts, a valid manifest
the truth.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.files import reading, sha256_of, size_of, unwatched
from megatron_run_engine.checkpoint.manifest import MANIFEST, Manifest, read_manifest

#: The name of the checkpoints' folder in a run folder.
CHECKPOINTS = "checkpoints"
#: The name of the hint.
LATEST = "latest"
_STEP = re.compile(r"step(0|[1-9][0-9]{0,17})")


class Checkpoints:
    """The steps saved under ``path``, which need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def folder(self, step: int) -> Path:
        """Where ``step`` lies."""
        return self.path / f"step{step}"

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)

    def hint(self) -> int | None:
        """The step that ``latest`` names; None where there is no such file, or nothing of sense in it."""
        try:
            with reading(self.path / LATEST) as file:
                match = _STEP.fullmatch(file.read(100).decode(errors="replace").strip())
        except CheckpointError:
            return None
        return int(match[1]) if match else None

    def newest(self) -> int | None:
        """The newest committed step, None when there is none.

        Raises :class:`CheckpointError` when ``latest`` names a newer one, which is gone: going on from an older step
        is the user's choice.
        """
        steps, hint = self.steps(), self.hint()
        newest = steps[-1] if steps else None
        if hint is not None and (newest is None or hint > newest):
            fix = f"to go on from step {newest}: --resume {newest}" if steps else "to start again: --resume never"
            raise CheckpointError(
                f"{self.folder(hint)} is missing", why=f"{self.path / LATEST} says that it was saved", fix=fix
            )
        return newest

    def find(self, step: int) -> Path:
        """Where ``step`` lies. Raises :class:`CheckpointError` with the steps that there are where it was not saved."""
        folder = self.folder(step)
        if folder.is_symlink() or not folder.is_dir():
            saved = ", ".join(map(str, self.steps()))
            raise CheckpointError(
                f"there is no checkpoint {folder}", fix=f"saved steps: {saved}" if saved else "no step is saved there"
            )
        return folder

    def manifest(self, step: int) -> Manifest:
        """What was saved at ``step``. Raises :class:`CheckpointError`."""
        folder = self.find(step)
        manifest = read_manifest(folder)
        if manifest.about.step != step:
            raise CheckpointError(f"{folder} is not what its name says", why=f"it holds step {manifest.about.step}")
        return manifest

    def looks_whole(self, step: int) -> bool:
        """Whether the manifest is valid and every file has its length; the files are not read."""
        try:
            manifest = self.manifest(step)
            for name in manifest.files:
                check_length(self.folder(step), name, manifest)
        except CheckpointError:
            return False
        return True

    def verify(self, step: int) -> Manifest:
        """Read every byte of ``step``. Raises :class:`CheckpointError` naming the first damaged file."""
        manifest = self.manifest(step)
        verify_files(self.folder(step), manifest, manifest.files)
        return manifest

    @contextmanager
    def offering_older(self, step: int, how: Callable[[int], str], otherwise: str = "") -> Iterator[None]:
        """Where the block finds ``step`` damaged, say ``how`` to take the newest older step that looks whole.

        Where there is none, ``otherwise``. Nothing older is taken but by the user.
        """
        try:
            yield
        except CheckpointError as error:
            older = next((each for each in reversed(self.steps()) if each < step and self.looks_whole(each)), None)
            error.fix = error.fix or (otherwise if older is None else how(older))
            raise


def find(path: Path | None) -> tuple[Checkpoints, int | None]:
    """The checkpoints of the run folder, checkpoints folder or step folder ``path``; the step where it is one's folder.

    None is the latest run. Raises :class:`CheckpointError` where there is none.
    """
    start = Path("runs/latest") if path is None else path
    if (start / MANIFEST).is_file():
        step = Checkpoints(start.absolute().parent)
        number = next((number for number in step.steps() if step.folder(number) == start.absolute()), None)
        if number is not None:
            return step, number
    for candidate in (start / CHECKPOINTS, start):
        found = Checkpoints(candidate)
        if found.steps():
            return found, None
    raise CheckpointError(f"no checkpoints in {start}", fix="name a run folder, its checkpoints, or one of its steps")


def find_step(path: Path | None, step: int | None = None) -> tuple[Checkpoints, int]:
    """The checkpoints at ``path`` as :func:`find` has them; of their steps ``step``, else ``path``'s, else the newest.

    Raises :class:`CheckpointError` where there is none.
    """
    checkpoints, named = find(path)
    return checkpoints, next(each for each in (step, named, checkpoints.steps()[-1]) if each is not None)


def verify_files(
    folder: Path,
    manifest: Manifest,
    names: Iterable[str],
    threads: int = 1,
    heartbeat: Callable[[], None] = unwatched,
) -> None:
    """Compare files with their SHA-256, so many at once; their threads call ``heartbeat`` at each stretch.

    Raises :class:`CheckpointError` naming the first that differs.
    """
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(partial(_verify_file, folder, manifest, heartbeat=heartbeat), names):
            pass


def _verify_file(folder: Path, manifest: Manifest, name: str, heartbeat: Callable[[], None]) -> None:
    check_length(folder, name, manifest)
    with reading(folder / name) as file:
        if sha256_of(file, heartbeat) != manifest.files[name].sha256:
            raise CheckpointError(f"{folder / name} is damaged", why="its SHA-256 is not that of the manifest")


def check_length(folder: Path, name: str, manifest: Manifest) -> None:
    """Raise :class:`CheckpointError` when a file is missing, or longer or shorter than it was."""
    with reading(folder / name) as file:
        size, expected = size_of(file), manifest.files[name].bytes
    if size != expected:
        raise CheckpointError(f"{folder / name} is damaged", why=f"it has {size} bytes, the manifest says {expected}")
