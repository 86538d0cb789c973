"""Saves a step: every rank writes its shards, then rank 0 commits. If one rank fails, all fail.

The commit survives a crash at any point, because each change is on disk (fsync) before the next one depends on it:

1. shards and manifest are written and synced in a temporary folder, then that folder is synced;
2. the temporary folder is renamed to ``step<N>``, which is the commit, and the parent folder is synced;
3. ``latest`` is replaced, and older steps are removed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.contracts.activity import Activity
from megatron_run.contracts.optimizer import MASTER
from megatron_run.errors import KEPT, CheckpointError
from megatron_run_engine.checkpoint.collectives import as_note, on_rank0, raise_first
from megatron_run_engine.checkpoint.files import FileSystem, lock, saving
from megatron_run_engine.checkpoint.manifest import MANIFEST, Manifest, make_manifest
from megatron_run_engine.checkpoint.shard_file import NAMES, file_name, split_into_files, write_shard
from megatron_run_engine.checkpoint.step_folder import LATEST_STEP, Checkpoints

if TYPE_CHECKING:
    from megatron_run.contracts.optimizer import StatePiece
    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.checkpoint.manifest import About


#: The lock file that lets one job save at a time.
LOCK = ".lock"
_TEMPORARY, _DELETED = ".tmp-", ".del-"


class Commit:
    """Commits steps of run ``run`` to ``checkpoints``. A committed step is never overwritten. OSErrors pass through.

    ``activity`` records each stage of a commit.
    """

    def __init__(self, checkpoints: Checkpoints, run: str, files: FileSystem, activity: Activity | None = None) -> None:
        self._checkpoints, self._run, self._files = checkpoints, run, files
        self._activity = activity or Activity()

    def temporary(self, step: int) -> Path:
        """Return the folder of ``step``'s files before the commit."""
        return self._checkpoints.path / f"{_TEMPORARY}step{step}-{self._run}"

    def make_home(self) -> None:
        """Create the folder of all checkpoints. Raises :class:`CheckpointError` if it is a link."""
        path = self._checkpoints.path
        if path.is_symlink():
            raise CheckpointError(f"{path} cannot hold checkpoints", why=f"it is a symbolic link to {path.readlink()}")
        if not path.is_dir():
            self._files.make_folder(path)
            self._sync_folder(path.parent)

    def begin(self, step: int) -> Path:
        """Remove what killed jobs left behind, and create the temporary folder."""
        target = self._checkpoints.folder(step)
        if target.is_symlink() or target.exists():
            raise CheckpointError(f"{target} exists", why=KEPT)
        self._clean()
        self._files.make_folder(self.temporary(step))
        return self.temporary(step)

    def finish(self, manifest: Manifest) -> None:
        """Commit the step of ``manifest``, whose shards are on disk, and point ``latest`` at it."""
        step = manifest.about.step
        temporary, target = self.temporary(step), self._checkpoints.folder(step)
        self._activity.enter("save-manifest", target.name)
        self._write(temporary / MANIFEST, manifest.encode())
        self._sync_folder(temporary)  # all names within must be on disk before the rename can be
        self._activity.enter("save-rename", target.name)
        self._files.rename(temporary, target)
        self._sync_folder(self._checkpoints.path)
        self._activity.enter("save-latest", target.name)
        self._point_latest_at(target)

    def retain(self, keep: int, every: int = 0) -> list[int]:
        """Remove the steps that are older than the ``keep`` newest whole steps, and return them.

        Steps that divide by ``every`` stay for ever; 0: none.
        """
        self._activity.enter("save-retention")
        steps = self._checkpoints.steps()[::-1]
        whole: list[int] = []
        if len(steps) > keep:  # else nothing is to be removed: do not read every manifest
            whole = [step for step in steps if self._checkpoints.looks_whole(step)][:keep]
        if len(whole) < keep:
            return []
        old = [step for step in reversed(steps) if step < whole[-1] and not (every and step % every == 0)]
        for step in old:
            self._remove(step)
        return old

    def set_aside(self, after: int | None, attempt: int) -> list[str]:
        """Rename the steps after ``after`` (None: all) to names with the number of the attempt. Return the new names.

        A run that resumes from an older step must not find them when it saves these steps again.
        """
        newer = [step for step in self._checkpoints.steps() if after is None or step > after]
        if not newer:
            return []
        # ``latest`` first: after a crash in between it must not name a step that is gone.
        if after is None:
            with suppress(FileNotFoundError):
                self._files.unlink(self._checkpoints.path / LATEST_STEP)
        else:
            self._point_latest_at(self._checkpoints.folder(after))
        folders = [self._checkpoints.folder(step) for step in newer]
        moved = [folder.with_name(f"{folder.name}-set-aside-by-attempt-{attempt:03d}") for folder in folders]
        for folder, name in zip(folders, moved, strict=True):
            self._files.rename(folder, name)
        self._sync_folder(self._checkpoints.path)
        return [folder.name for folder in moved]

    def give_up(self, step: int) -> None:
        """Remove the files of a step that will not be committed, as far as the disk allows."""
        with suppress(OSError):
            self._files.remove_tree(self.temporary(step))

    def _point_latest_at(self, target: Path) -> None:
        """Replace ``latest`` atomically. A killed job may have left ``latest.tmp``."""
        path, temporary = self._checkpoints.path / LATEST_STEP, self._checkpoints.path / f"{LATEST_STEP}.tmp"
        with suppress(FileNotFoundError):
            self._files.unlink(temporary)
        self._write(temporary, f"{target.name}\n".encode())
        self._files.replace(temporary, path)
        self._sync_folder(self._checkpoints.path)

    def _write(self, path: Path, content: bytes) -> None:
        with self._files.create(path) as file:
            file.write(content)
            file.sync()
        self._activity.heartbeat()

    def _sync_folder(self, path: Path) -> None:
        self._files.sync_folder(path)
        self._activity.heartbeat()  # each wait for the disk has the whole time limit

    def _remove(self, step: int) -> None:
        """Rename a step, then remove it: a half removed step must not look like a damaged one."""
        deleted = self._checkpoints.path / f"{_DELETED}step{step}-{self._run}"
        self._files.rename(self._checkpoints.folder(step), deleted)
        self._sync_folder(self._checkpoints.path)
        self._files.remove_tree(deleted)

    def _clean(self) -> None:
        for entry in sorted(self._checkpoints.path.iterdir()):
            if entry.name.startswith((_TEMPORARY, _DELETED)) and entry.is_dir() and not entry.is_symlink():
                self._files.remove_tree(entry)


#: The fewest whole steps that may be kept: if the newest turns out to be damaged, there is another.
FEWEST = 2


@dataclass(frozen=True)
class Retention:
    """Which steps stay: the ``keep`` newest whole ones, and those that divide by ``every``, if it is not 0.

    ``removed`` is called on rank 0 with the steps that a save removed.
    """

    keep: int = FEWEST
    every: int = 0
    removed: Callable[[Sequence[int]], None] = lambda _: None

    def __post_init__(self) -> None:
        if self.keep < FEWEST:
            raise ValueError(f"at least {FEWEST} steps are kept, got {self.keep}")


Shapes = Mapping[str, tuple[int, ...]]
#: A rank's report on its shards to rank 0, as JSON data.
Note = Mapping[str, Any]


@dataclass(frozen=True)
class ShardWriter:
    """Writes the shards of rank ``rank``: up to ``files_of_rank`` files, ``at_once`` at a time."""

    rank: int
    files: FileSystem
    activity: Activity
    files_of_rank: int = 1
    at_once: int = 1

    def write(self, folder: Path, pieces: Iterable[StatePiece], shapes: Shapes) -> Note:
        """Write ``pieces`` of logical tensors with these global ``shapes`` to ``folder``. Return the rank's report."""
        groups = split_into_files(list(pieces), self.files_of_rank)
        parts = {file_name(self.rank, part): group for part, group in enumerate(groups)}
        rows = [row for name, group in parts.items() for row in described(name, group)]
        with ThreadPoolExecutor(self.at_once) as pool:
            written = pool.map(lambda name: self._write_file(folder / name, parts[name]), parts)
            files = dict(zip(parts, written, strict=True))
        return {"failure": None, "files": files, "shapes": dict(shapes), "pieces": rows}

    def _write_file(self, path: Path, pieces: Iterable[StatePiece]) -> dict[str, Any]:
        return write_shard(path, pieces, self.files, self.activity.heartbeat)._asdict()


class Saver:
    """Saves steps of the run ``run`` and removes old ones by ``retention``. ``activity`` records the progress.

    A rank with much state writes up to ``files_of_rank`` files, ``at_once`` at a time.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        ranks: Ranks,
        run: str,
        retention: Retention | None = None,
        files: FileSystem | None = None,
        activity: Activity | None = None,
        files_of_rank: int = 1,
        at_once: int = 1,
    ) -> None:
        self._checkpoints, self._ranks, self._run = checkpoints, ranks, run
        self._retention = Retention() if retention is None else retention
        self._files = files or FileSystem()
        self._activity = activity or Activity()
        self._commit = Commit(checkpoints, run, self._files, self._activity)
        self._shards = ShardWriter(ranks.rank, self._files, self._activity, files_of_rank, at_once)

    def save(self, about: About, pieces: Iterable[StatePiece], shapes: Shapes) -> int:
        """Save the step of ``about``: this rank's ``pieces`` of logical tensors with these global ``shapes``.

        Collective. Returns the size of the committed step in bytes. Raises :class:`CheckpointError` on every rank if a
        disk or a rank fails. Steps saved before are then untouched.
        """
        with ExitStack() as held:  # rank 0 holds the lock until the step is committed
            on_rank0(self._ranks, lambda: self._begin(about.step, held))
            note, failure = self._write(about.step, pieces, shapes)
            notes = self._ranks.gather(json.dumps(note))
            return int(on_rank0(self._ranks, lambda: self._finish(about, notes), failure))

    def set_aside(self, after: int | None, attempt: int) -> None:
        """Rename the steps after ``after`` (None: all) before a run resumes from there. Collective."""
        on_rank0(self._ranks, lambda: self._move(after, attempt))

    def _move(self, after: int | None, attempt: int) -> str:
        if not self._checkpoints.steps():
            return ""
        with saving("newer steps could not be set aside"), lock(self._checkpoints.path / LOCK, self._run):
            return " ".join(self._commit.set_aside(after, attempt))

    def _begin(self, step: int, held: ExitStack) -> str:
        with saving(f"step {step} could not be saved"):
            self._commit.make_home()
            held.enter_context(lock(self._checkpoints.path / LOCK, self._run))
            return str(self._commit.begin(step))

    def _write(self, step: int, pieces: Iterable[StatePiece], shapes: Shapes) -> tuple[Note, Exception | None]:
        """Write this rank's shards. Return the report for rank 0, and the error if it failed."""
        folder = self._commit.temporary(step)
        try:
            with saving(f"step {step} could not be saved"):
                self._activity.enter(
                    "save-shard", f"{self._checkpoints.folder(step).name}/{file_name(self._ranks.rank)}"
                )
                return self._shards.write(folder, pieces, shapes), None
        except Exception as error:  # any error: rank 0 waits for this rank's report
            return {"failure": as_note(error, f"step {step} could not be saved")}, error

    def _finish(self, about: About, texts: Sequence[str]) -> str:
        """Commit the shards that the ranks report, then remove old steps. Return the step's size."""
        notes = [json.loads(text) for text in texts]
        with saving(f"step {about.step} could not be saved"):
            try:
                raise_first([json.dumps(note["failure"]) for note in notes])
                files = {name: file for note in notes for name, file in note["files"].items()}
                manifest = make_manifest(about, files, joined(notes))
                self._commit.finish(manifest)
            except BaseException:
                self._commit.give_up(about.step)
                raise
        with saving(f"steps older than {about.step} could not be removed"):
            removed = self._commit.retain(self._retention.keep, self._retention.every)
        if removed:
            self._retention.removed(removed)
        return str(manifest.size)


def described(file: str, pieces: Iterable[StatePiece]) -> list[tuple[Any, ...]]:
    """Describe the contents of ``file``, one row per piece."""
    return [(file, piece.name, piece.field, NAMES[piece.tensor.dtype], piece.starts, piece.sizes) for piece in pieces]


def joined(notes: Sequence[Note]) -> dict[str, dict[str, Any]]:
    """Join the tensors of all ranks' reports for the manifest. A tensor of which no rank has a piece gets no fields."""
    shapes: dict[str, list[int]] = {}
    for note in notes:
        for name, shape in note["shapes"].items():
            if shapes.setdefault(name, shape) != shape:
                raise CheckpointError(f"the ranks disagree on the shape of {name}", why=f"{shape}, {shapes[name]}")
    tensors: dict[str, dict[str, Any]] = {name: {} for name in shapes}
    for note in notes:
        for file, name, field, dtype, starts, sizes in note["pieces"]:
            record = tensors[name].setdefault(field, {"dtype": dtype, "shape": shapes[name], "pieces": []})
            if record["dtype"] != dtype:
                raise CheckpointError(f"the ranks disagree on the type of {field} of {name}")
            record["pieces"].append((file, starts, sizes))
    for fields in tensors.values():
        for field, record in fields.items():
            (_, starts, sizes), *others = record["pieces"]
            if field != MASTER and not others and not any(starts):
                record["shape"] = sizes  # state with a shape of its own, such as a step count
    return tensors
