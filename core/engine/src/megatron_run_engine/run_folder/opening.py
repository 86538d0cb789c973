"""Creates, joins or refuses a run folder, locks it, and opens each attempt. No file of another run is overwritten."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.contracts.meaning import LENGTH
from megatron_run.errors import ExitCode, InputError, RunError
from megatron_run.files.safe_folder import SafeFolder
from megatron_run_engine.run_folder.changes import (
    Change,
    check_goes_on,
    check_names,
    digest,
    find_changes,
    find_refusal,
    has_trained,
    identity,
    with_added_options,
    with_moved_tokenizer,
)
from megatron_run_engine.run_folder.folder import ATTEMPT, RunFolder, Status, is_run_id, unusable
from megatron_run_engine.run_folder.length import check_length
from megatron_run_engine.run_folder.lock import FolderLock
from megatron_run_engine.run_folder.permissions import sound_permissions
from megatron_run_engine.run_folder.records import attempt_record, write_records
from megatron_run_engine.run_folder.undoing import REFUSALS, Before

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun


#: Where folders without a name of their own lie.
_RUNS = Path("runs")
#: Seconds within which a network file system shows a new file on other hosts.
VISIBLE_WITHIN = 10.0
#: Files that a folder may hold before it has a ``run.json``: locks, and what a killed job had of that file.
_BEFORE = re.compile(r"\.lock(-exclusive)?|\.run\.json\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True)
class OpenedFolder:
    """A run folder with its lock, and what there was ``before`` it was opened.

    ``finished`` tells whether an earlier attempt has reached the last step, and ``last`` how the one before ended.
    """

    folder: RunFolder
    lock: FolderLock
    run_id: str
    before: Before
    finished: bool = False
    last: Status | None = None

    def end(self, code: ExitCode, message: str = "", *, keep: bool = False) -> bool:
        """Report how the attempt ended; whether it is taken back, as one that was refused before it began.

        ``keep`` keeps that one too. Raises what :meth:`RunFolder.end` does.
        """
        if code in REFUSALS and not keep and not self.folder.begun:
            self.before.restore(self.folder)
            self.folder.refuse(code, message)
            return True
        self.folder.end(code, message)
        return False


def open_run_folder(run: ResolvedRun, arguments: Sequence[str] = (), why: str = "") -> OpenedFolder:
    """Create or join the run folder of ``run``, and describe this attempt in it. Called by rank 0 or the launcher.

    ``why`` is what led to the attempt, where a launcher has decided it.

    If ``run.folder`` is unset, the folder is a new ``runs/<date>-<time>-<id>``. Raises :class:`InputError` for a folder
    that belongs to another run or job, is no run folder, is a link to elsewhere, or cannot be written.
    """
    wanted = run.config.run.folder
    check_goes_on(run)
    try:
        before, lock = _new_folder() if wanted is None else _chosen_folder(wanted)
        try:
            opened = _enter(before.with_status(), lock, run, arguments, why)
        except BaseException:
            before.leave(locked=True)
            lock.release()
            raise
    except OSError as error:
        raise unusable(wanted or _RUNS, error) from error
    return opened


def check_run_folder(run: ResolvedRun) -> None:
    """Raise what :func:`open_run_folder` would for the folder ``run.folder``; nothing is written, and no lock taken."""
    wanted = run.config.run.folder
    check_goes_on(run)
    if wanted is None:
        return
    path = _follow_sibling_link(wanted.expanduser().absolute())
    _check_entries(path)
    record = _read_record(path) if path.is_dir() else None
    if record is None:
        check_goes_on(run, path)
    else:
        _check_same_run(path, record, identity(run), run)


@contextmanager
def recording_refusals(wanted: Path | None) -> Iterator[None]:
    """Within: why a start is refused comes into the status of the run in ``wanted``, where scripts read it.

    Nothing is written where no attempt of a run is, nor while a job holds the folder.
    """
    try:
        yield
    except RunError as error:
        if wanted is not None and error.exit_code in REFUSALS:
            with suppress(RunError, OSError):
                path = _follow_sibling_link(wanted.expanduser().absolute())
                record = _read_record(path) if path.is_dir() else None
                if record is not None:
                    with FolderLock(path):
                        RunFolder(path, len(record["attempts"])).refuse(error.exit_code, str(error))
        raise


def join_run_folder(path: Path, attempt: int, run_id: str, rank: int, wait: float = VISIBLE_WITHIN) -> RunFolder:
    """Return the folder that rank 0 opened, for another rank.

    Raises :class:`InputError` if this host does not see rank 0's ``run.json`` within ``wait`` seconds.
    """
    deadline = time.monotonic() + wait
    # NFS clients keep a directory's entries for seconds, so a file that is missing now may have been written long ago.
    while not _shows(path, attempt, run_id):
        if time.monotonic() > deadline:
            raise InputError(
                f"run folder {path} is not shared by all hosts",
                why="what rank 0 wrote there cannot be read here",
                fix="set run.folder to a folder on a file system that every host mounts",
            )
        time.sleep(0.1)
    return RunFolder(path, attempt, rank)


def _shows(path: Path, attempt: int, run_id: str) -> bool:
    folder = RunFolder(path, attempt)
    record = folder.files.read_json(f"{folder.records}/{ATTEMPT}")
    return record is not None and record.get("id") == run_id


def _new_folder() -> tuple[Before, FolderLock]:
    runs = _RUNS.absolute()
    made = _outermost_missing(runs)
    with _left_as_it_was(Before(runs, made)):
        runs.mkdir(parents=True, exist_ok=True)
        while True:
            path = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
            with suppress(FileExistsError):  # mkdir decides between jobs of one second with equal random parts
                path.mkdir()
                break
    before = Before(path, made or path)
    with _left_as_it_was(before):
        return before, FolderLock(path)


def _chosen_folder(wanted: Path) -> tuple[Before, FolderLock]:
    path = _follow_sibling_link(wanted.expanduser().absolute())
    _check_entries(path)
    before = Before(path, _outermost_missing(path))
    with _left_as_it_was(before):
        path.mkdir(parents=True, exist_ok=True)
        return before, FolderLock(path)


@contextmanager
def _left_as_it_was(before: Before) -> Iterator[None]:
    """Within: a failure removes the folders that were made, in which nothing lies yet."""
    try:
        yield
    except BaseException:
        before.leave(locked=False)
        raise


def _outermost_missing(path: Path) -> Path | None:
    """The first of the folders on the way to ``path`` that is not there; None where all are."""
    return next((each for each in (*reversed(path.parents), path) if not each.exists()), None)


def _check_entries(path: Path) -> None:
    """Raise :class:`InputError` for a file, and for a folder of something else than a run."""
    if path.exists() and not path.is_dir():
        raise _refusal(path, "it is a file")
    entries = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if "run.json" not in entries and not all(map(_BEFORE.fullmatch, entries)):
        raise _refusal(path, "it holds other files and no run.json")


def _follow_sibling_link(path: Path) -> Path:
    """Follow a link to a run next to it, as early versions made. Raises :class:`InputError` for other links."""
    if not path.is_symlink():
        return path
    target = path.resolve()
    if target.parent != path.parent.resolve():
        raise _refusal(path, f"it is a symbolic link to {target}")
    return target


def _refusal(path: Path, why: str) -> InputError:
    return InputError(f"{path} is not a run folder", why=why, fix="choose a new or an empty run.folder")


def _enter(before: Before, lock: FolderLock, run: ResolvedRun, arguments: Sequence[str], why: str) -> OpenedFolder:
    path, keys = before.path, identity(run)
    record = _read_record(path)
    if record is None:
        check_goes_on(run, path)
    if record is None:  # nothing was trained: not yet, or by a job that was killed before it was recorded
        record = {"v": 1, "id": secrets.token_hex(16), "digest": digest(keys), "identity": keys, "attempts": []}
    changed = _check_same_run(path, record, keys, run)
    last = RunFolder(path, max(1, len(record["attempts"])))
    status = last.read_status()
    finished = status is not None and status.state == "finished" and run.request.resume == "auto"
    if finished and LENGTH.isdisjoint(change.key for change in changed):
        last.refuse(ExitCode.DONE, "")  # whatever an earlier start was refused for
        return OpenedFolder(last, lock, record["id"], before, finished=True)
    folder = RunFolder(path, len(record["attempts"]) + 1)
    entry = attempt_record(folder.attempt, run, arguments, changed, why)
    other = changed or run.request.allow_plugin_change  # another plugin's keys are no change
    becomes = {"digest": digest(keys), "identity": keys} if other else {}
    prepared = {"v": 1, "id": record["id"], "entry": entry, "becomes": becomes}
    try:
        _describe(folder, run, record, prepared)
    except BaseException:
        before.restore(folder)
        raise
    return OpenedFolder(folder, lock, record["id"], before, last=status)


def _describe(folder: RunFolder, run: ResolvedRun, record: dict[str, Any], prepared: dict[str, Any]) -> None:
    """Describe an attempt in the folder of its logs, and a run's first one in the run folder: nothing is there yet.

    A later one is what the run is once nothing refuses it (:meth:`RunFolder.begin`). A job that was killed before that
    may have left such a folder, and is no attempt. The lock is held: whatever lies there is nobody's.
    """
    if folder.attempt == 1:
        folder.files.write_json("run.json", record)  # before any other file, which alone would make it no run folder
    write_records(folder, run)
    folder.start()
    folder.write_record(ATTEMPT, prepared)  # last: other ranks take the attempt for open as soon as it is there
    if folder.attempt == 1:
        folder.publish(prepared)


def _read_record(path: Path) -> dict[str, Any] | None:
    """The content of ``run.json``, None before the first attempt. Raises :class:`InputError` for what no run writes."""
    record = SafeFolder(path).read_json("run.json")
    if record is None:
        if os.path.lexists(path / "run.json"):
            raise _refusal(path, "its run.json cannot be read")
        return None
    attempts = record.get("attempts")
    sound = isinstance(attempts, list) and all(
        isinstance(each, dict) and isinstance(each.get("changes", {}), dict) and sound_permissions(each)
        for each in attempts
    )
    if not (sound and is_run_id(record.get("id")) and isinstance(record.get("identity", {}), dict)):
        raise _refusal(path, "its run.json is not what a run writes")
    return record if attempts else None


def _check_same_run(path: Path, record: dict[str, Any], keys: dict[str, Any], run: ResolvedRun) -> tuple[Change, ...]:
    """Return what was changed with permission or before a step. Raises :class:`InputError` for all else."""
    check_names(run.request, run)
    before = with_moved_tokenizer(with_added_options(record.get("identity", {}), run), keys, path)
    found = find_changes(before, run, run.request.allow_plugin_change)
    check_length(run, found, path)  # before permissions are asked for: there is none
    refusal = find_refusal(found, run.request, path)
    if refusal is not None and has_trained(path):
        raise InputError(f"run folder {path} belongs to another run", why=refusal.why, fix=refusal.fix)
    return found
