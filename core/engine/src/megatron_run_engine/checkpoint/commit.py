"""How a step gets onto the disk so that it is there whole or not at all, whenever the machine stops. Rank 0 does this.

The order is the point: shards, then the manifest, then the final name, then ``latest``, then the removal of old steps;
each on the disk before the next begins.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from megatron_run.contracts.activity import Activity
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.files import FileSystem
from megatron_run_engine.checkpoint.manifest import MANIFEST, Manifest
from megatron_run_engine.checkpoint.step_folder import LATEST, Checkpoints

#: The file by which one job at a time saves.
LOCK = ".lock"
_TEMPORARY, _DELETED = ".tmp-", ".del-"


class Commit:
    """Puts steps of run ``run`` into ``checkpoints``. A committed step is never overwritten. OSErrors pass through.

    ``phases`` hears of each of the stages in which a step becomes one.
    """

    def __init__(self, checkpoints: Checkpoints, run: str, files: FileSystem, activity: Activity | None = None) -> None:
        self._checkpoints, self._run, self._files = checkpoints, run, files
        self._activity = Activity() if activity is None else activity

    def temporary(self, step: int) -> Path:
        """Where the files of ``step`` are until it is committed."""
        return self._checkpoints.path / f"{_TEMPORARY}step{step}-{self._run}"

    def make_home(self) -> None:
        """Make the folder of all checkpoints, which must not lie behind a link."""
        path = self._checkpoints.path
        if path.is_symlink():
            raise CheckpointError(f"{path} cannot hold checkpoints", why=f"it is a symbolic link to {path.readlink()}")
        if not path.is_dir():
            self._files.make_folder(path)
            self._files.sync_folder(path.parent)

    def begin(self, step: int) -> Path:
        """Make the temporary folder, once what killed jobs left behind is gone."""
        target = self._checkpoints.folder(step)
        if target.is_symlink() or target.exists():
            raise CheckpointError(f"{target} exists already", why="a saved step is never overwritten")
        self._clean()
        self._files.make_folder(self.temporary(step))
        return self.temporary(step)

    def finish(self, manifest: Manifest) -> None:
        """Commit the step of ``manifest``, whose shards are on the disk, and point ``latest`` at it."""
        step = manifest.about.step
        temporary, target = self.temporary(step), self._checkpoints.folder(step)
        self._activity.enter("save-manifest", target.name)
        self._write(temporary / MANIFEST, manifest.encode())
        self._files.sync_folder(temporary)
        self._activity.enter("save-rename", target.name)
        self._files.rename(temporary, target)
        self._files.sync_folder(self._checkpoints.path)
        self._activity.enter("save-latest", target.name)
        self._point_latest_at(target)

    def retain(self, keep: int) -> None:
        """Remove the steps that are older than the ``keep`` newest whole ones."""
        self._activity.enter("save-retention")
        steps = self._checkpoints.steps()[::-1]
        if len(steps) <= keep:
            return  # whether they are whole is then all the same, and takes reading their manifests
        whole = [step for step in steps if self._checkpoints.looks_whole(step)][:keep]
        if len(whole) == keep:
            for step in reversed([step for step in steps if step < whole[-1]]):
                self._remove(step)

    def set_aside(self, after: int | None, attempt: int) -> list[str]:
        """Give the steps after ``after`` (None: all) names that say which attempt left them; the new names.

        A run that goes on from an older step would otherwise meet them again. ``latest`` is moved back first.
        """
        newer = [step for step in self._checkpoints.steps() if after is None or step > after]
        if not newer:
            return []
        if after is None:
            with suppress(FileNotFoundError):
                self._files.unlink(self._checkpoints.path / LATEST)
        else:
            self._point_latest_at(self._checkpoints.folder(after))
        folders = [self._checkpoints.folder(step) for step in newer]
        moved = [folder.with_name(f"{folder.name}-set-aside-by-attempt-{attempt:03d}") for folder in folders]
        for folder, name in zip(folders, moved, strict=True):
            self._files.rename(folder, name)
        self._files.sync_folder(self._checkpoints.path)
        return [folder.name for folder in moved]

    def give_up(self, step: int) -> None:
        """Remove what there is of a step that will not be committed, as far as that is possible."""
        with suppress(OSError):
            self._files.remove_tree(self.temporary(step))

    def _point_latest_at(self, target: Path) -> None:
        """``latest.tmp`` may be left from a job that was killed."""
        path, temporary = self._checkpoints.path / LATEST, self._checkpoints.path / f"{LATEST}.tmp"
        with suppress(FileNotFoundError):
            self._files.unlink(temporary)
        self._write(temporary, f"{target.name}\n".encode())
        self._files.replace(temporary, path)
        self._files.sync_folder(self._checkpoints.path)

    def _write(self, path: Path, content: bytes) -> None:
        with self._files.create(path) as file:
            file.write(content)
            file.sync()

    def _remove(self, step: int) -> None:
        """Under another name first: a step that is half removed must not look like one that is damaged."""
        deleted = self._checkpoints.path / f"{_DELETED}step{step}-{self._run}"
        self._files.rename(self._checkpoints.folder(step), deleted)
        self._files.sync_folder(self._checkpoints.path)
        self._files.remove_tree(deleted)

    def _clean(self) -> None:
        for entry in sorted(self._checkpoints.path.iterdir()):
            if entry.name.startswith((_TEMPORARY, _DELETED)) and entry.is_dir() and not entry.is_symlink():
                self._files.remove_tree(entry)
