"""The folder of a run's steps in the memory of one host, ``<memory folder>/megatron-run-<uid>/<run id>``.

It holds steps as a run folder does, but of each the files of this host's ranks and of those whose copies they keep.
Nobody else may enter it, no link in it is followed, and one process of the host changes it: the leader of its ranks.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_run.errors import CheckpointError, InputError
from megatron_run.files.safe_folder import SafeFolder
from megatron_run_engine.checkpoint.files import FileSystem, MemoryFiles, read_whole, reason
from megatron_run_engine.checkpoint.manifest import LARGEST, MANIFEST, Manifest
from megatron_run_engine.checkpoint.memory_folder import (
    OFF,
    RECORD,
    check_private,
    check_writable,
    memory_folder,
    own_home,
    run_in,
    unusable,
    useless_homes,
    user_folder,
)
from megatron_run_engine.checkpoint.step_folder import Checkpoints, check_length

if TYPE_CHECKING:
    from megatron_run.contracts.schema import CheckpointSection

_TEMPORARY = ".tmp-"


class Held(NamedTuple):
    """The part of ``step`` that a host holds: ``files`` of ``whole``, by a manifest of ``size`` bytes."""

    step: int
    sha256: str
    size: int
    whole: int
    files: tuple[str, ...]


class MemoryHome:
    """The home of the run ``run`` in the run folder ``home``, below the memory ``folder`` of this host."""

    def __init__(self, folder: Path, run: str, home: Path, files: FileSystem | None = None) -> None:
        self._user = user_folder(folder)
        self._run, self._files = run, files or MemoryFiles()
        #: The steps. A :class:`Checkpoints` of a part of their files.
        self.steps = Checkpoints(self._user / run, home)

    @property
    def path(self) -> Path:
        """The folder."""
        return self.steps.path

    def make(self) -> None:
        """Create the folder, where it is missing, and propose a token. Raises :class:`InputError`.

        Once all ranks have, :meth:`token` is the same for those that share the folder.
        """
        try:
            for path in (self._user, self.path):
                with suppress(FileExistsError):
                    self._files.make_folder(path)
                check_private(path)
            self.check()
            self._describe()
        except OSError as error:
            raise unusable(self.path, reason(error)) from error

    def _describe(self) -> None:
        record, described = self._record(), {"run": self._run, "folder": str(self.steps.home)}
        if record.get("run") != self._run:
            record = {"v": 1, "token": secrets.token_hex(16)}
        if not described.items() <= record.items():  # it is new, or the run folder was moved
            SafeFolder(self.path).write_json(RECORD, {**record, **described})

    def check(self) -> None:
        """Raise :class:`InputError` unless the folder is this run's, and nobody else's; OSError where there is none."""
        for path in (self._user, self.path):
            check_private(path)
        other = Path(str(self._record().get("folder", self.steps.home)))
        if other != self.steps.home and run_in(other) == self._run and not _is_same(other, self.steps.home):
            raise InputError(
                f"{self.path} is for the steps of the run in {other}",
                why=f"{self.steps.home} is a copy of it",
                fix=f"set checkpoint.memory_folder to another folder of a tmpfs, {OFF}",
            )

    def token(self) -> str:
        """The token. Raises :class:`CheckpointError` where the folder has lost it."""
        token = self._record().get("token")
        if not isinstance(token, str):
            raise CheckpointError(f"{self.path} holds no steps in memory any more", why="it was changed meanwhile")
        return token

    def _record(self) -> Mapping[str, Any]:
        return SafeFolder(self.path).read_json(RECORD) or {}

    def temporary(self, step: int) -> Path:
        """The folder of ``step`` until its commit."""
        return self.path / f"{_TEMPORARY}step{step}"

    def begin(self, step: int) -> None:
        """Make room for ``step``: of those before, the newest alone stays. Raises OSError."""
        for entry in sorted(self.path.iterdir()):
            if entry.name.startswith(_TEMPORARY):
                self._files.remove_tree(entry)
        for old in [each for each in self.steps.steps() if each < step][:-1]:
            self._remove(old)
        self.forget(step - 1)  # a run that went back does that step again
        self._files.make_folder(self.temporary(step))

    def commit(self, manifest: Manifest) -> None:
        """Commit the step of ``manifest``, whose files lie in the temporary folder. Raises OSError."""
        step = manifest.about.step
        self.write_manifest(self.temporary(step), manifest)
        self._files.rename(self.temporary(step), self.steps.folder(step))

    def write_manifest(self, folder: Path, manifest: Manifest) -> None:
        """Write ``manifest`` into ``folder``."""
        with self._files.create(folder / MANIFEST) as file:
            file.write(manifest.encode())

    def take_in(self, manifest: Manifest, *, anew: bool) -> None:
        """Make a folder for the step of ``manifest``, of which other hosts hold files, where there is none.

        With ``anew`` one that is there goes: its files are of another save of the step.
        """
        if anew:
            self._clear(self.steps.folder(manifest.about.step))
        if not self.steps.folder(manifest.about.step).exists():
            self.give_up(manifest.about.step)
            try:
                self._files.make_folder(self.temporary(manifest.about.step))
                self.commit(manifest)
            except OSError:
                self.give_up(manifest.about.step)
                raise

    def give_back(self, step: int, files: Iterable[str]) -> None:
        """Remove ``files`` of ``step`` that have come from other hosts, as far as possible: not all had room."""
        for file in files:
            self.refuse(step, file)

    def give_up(self, step: int) -> None:
        """Remove the files of a step that will not be committed, as far as possible."""
        with suppress(OSError):
            self._files.remove_tree(self.temporary(step))

    def forget(self, after: int | None) -> None:
        """Remove the steps after ``after`` (None: all), as far as possible: the run goes on from there."""
        for step in self.steps.steps():
            if after is None or step > after:
                with suppress(OSError):
                    self._remove(step)

    def begun(self, attempt: int, step: int | None) -> None:
        """Note that ``attempt`` goes on from ``step``, None for the beginning, and remove the steps after it."""
        self.forget(step)
        with suppress(OSError):
            SafeFolder(self.path).write_json(RECORD, {**self._record(), "attempt": attempt})

    def forget_undone(self, begun: Mapping[int, int]) -> str:
        """Remove the steps that attempts without this host have gone back behind; the line that says so, or empty.

        ``begun`` is from which step each attempt of the run went on.
        """
        last = self._record().get("attempt")
        since = {step: attempt for attempt, step in begun.items() if isinstance(last, int) and attempt > last}
        undone = [step for step in self.steps.steps() if since and step > min(since)]
        if not undone:
            return ""
        self.forget(min(since))
        steps = ", ".join(map(str, undone))
        return f"step {steps} in {self.path} is not used: attempt {since[min(since)]} went on from step {min(since)}"

    def refuse(self, step: int, file: str) -> None:
        """Remove a ``file`` of ``step`` that is not what it should be, so that no one takes it for a copy."""
        self._clear(self.steps.folder(step) / file)

    def remove(self) -> None:
        """Remove all, as far as possible."""
        with suppress(OSError):
            self._files.remove_tree(self.path)

    def _remove(self, step: int) -> None:
        deleted = self.path / f"{_TEMPORARY}deleted-{step}"
        self._files.rename(self.steps.folder(step), deleted)  # whole, or not a step
        self._files.remove_tree(deleted)

    def survey(self) -> tuple[list[Held], list[str]]:
        """The steps that lie here, and a line for each thing that is refused and removed. Contents are not read."""
        held, refused = [], []
        for step in self.steps.steps():
            try:
                manifest = self._own_manifest(step)
                content = read_whole(self.steps.folder(step) / MANIFEST, LARGEST)
            except CheckpointError as error:
                refused.append(str(error))
                self._clear(self.steps.folder(step))
                continue
            files = [*self._whole_files(step, manifest, refused)]
            sha256 = hashlib.sha256(content).hexdigest()
            held.append(Held(step, sha256, len(content), len(manifest.files), tuple(files)))
        return held, refused

    def _own_manifest(self, step: int) -> Manifest:
        manifest = self.steps.manifest(step)
        if manifest.about.run != self._run:
            raise CheckpointError(f"{self.steps.folder(step)} is of another run", why=manifest.about.run)
        return manifest

    def _whole_files(self, step: int, manifest: Manifest, refused: list[str]) -> Iterator[str]:
        for name in manifest.files:
            if os.path.lexists(self.steps.folder(step) / name):
                try:
                    check_length(self.steps.folder(step), name, manifest)
                    yield name
                except CheckpointError as error:
                    refused.append(str(error))
                    self.refuse(step, name)

    def _clear(self, path: Path) -> None:
        """Remove what lies in the place of ``path``, be it a file, a folder or a link, as far as possible."""
        with suppress(OSError):
            (self._files.remove_tree if path.is_dir() and not path.is_symlink() else self._files.unlink)(path)

    def sweep(self) -> list[str]:
        """Remove homes beside this one that nobody needs; the lines that say so."""
        removed = []
        for path, why in useless_homes(self._user):
            if path == self.path:
                continue
            with suppress(OSError):  # another run removes it: that is not this one's end
                self._files.remove_tree(path)
                removed.append(f"{path} is removed: {why}")
        return removed


def _is_same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        return one.samefile(other)
    return False


def check_home(folder: Path, home: Path | None) -> None:
    """Raise :class:`InputError` unless the run in the run folder ``home``, if there is one, can use ``folder``."""
    check_writable(folder)
    if home is not None and (own := own_home(folder, home)) is not None:
        with suppress(FileNotFoundError):
            MemoryHome(folder, own.name, home).check()


def forget_steps(section: CheckpointSection, run: str, folder: Path, after: int | None) -> None:
    """Remove the steps of ``run`` in ``folder`` after ``after`` (None: all) that an attempt before has left here.

    For one without steps in memory: what it does again must not be found there by the next.
    """
    with suppress(InputError, OSError):
        home = MemoryHome(memory_folder(section), run, folder)
        home.check()  # a link of somebody else's may lead to steps of another run, on disk
        home.forget(after)


def newest_in_memory(section: CheckpointSection, run: str, folder: Path) -> int | None:
    """The newest step of ``run`` in the run ``folder`` that memory holds on this host; None where there is none.

    For a line to the user: whether it is whole, the ranks find out.
    """
    if section.memory_interval.amount:
        with suppress(InputError, OSError):
            home = MemoryHome(memory_folder(section), run, folder)
            home.check()
            return max(home.steps.steps(), default=None)
    return None


def not_on_disk(step: int, held: int) -> CheckpointError:
    """The refusal of ``step``, asked for by its number, where memory holds steps up to ``held``."""
    return CheckpointError(
        f"step {step} is not on disk, where one is read that is asked for by its number",
        fix=f"to go on from step {held}, the newest in memory: --resume auto",
    )
