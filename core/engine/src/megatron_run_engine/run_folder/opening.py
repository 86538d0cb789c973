"""Creates, joins or refuses a run folder, locks it, and records each attempt. No file of another run is overwritten.

An attempt's records are its configuration, plan, environment, command and host.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from socket import gethostname
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megatron_run.errors import InputError, system_limit
from megatron_run.files.safe_folder import SafeFolder
from megatron_run.planning.describe import run_record
from megatron_run.planning.run import to_yaml
from megatron_run_engine.checkpoint.files import NO_FLOCK
from megatron_run_engine.run_folder.changes import (
    LENGTH,
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
from megatron_run_engine.run_folder.folder import RunFolder, is_run_id

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun


class FolderLock:
    """The lock of a run folder, held from the constructor until ``release`` or the end of the ``with`` block.

    ``path/.lock`` is locked with flock, which the operating system releases when the process dies. On file systems
    without flock a file created with O_EXCL serves as the lock. Raises :class:`InputError` naming the holder if another
    job holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path / ".lock"
        self._exclusive = path / ".lock-exclusive"
        self._handle: int | None = None
        self._owns_file = False
        self._acquire()

    def _acquire(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self._path, flags | os.O_NONBLOCK, 0o644)
        try:
            self._lock(handle)
            os.ftruncate(handle, 0)  # only now: until the lock is held, the content names its holder
            os.write(handle, _process_name())
        except BaseException:
            os.close(handle)
            self._remove_exclusive()
            raise
        self._handle = handle

    def release(self) -> None:
        """Release the lock. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):  # a close that fails has closed, and nobody needs what was in the file
                os.close(handle)  # .lock itself stays: a job that waits on a removed file would lock nothing
        self._remove_exclusive()

    def _remove_exclusive(self) -> None:
        if self._owns_file:
            self._owns_file = False
            self._exclusive.unlink(missing_ok=True)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _lock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use(self._path, "wait for it or choose another run.folder") from None
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            self._make_exclusive()  # unlike flock it survives a killed process, so the refusal says what to delete

    def _make_exclusive(self) -> None:
        try:
            handle = os.open(self._exclusive, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            fix = f"if that process is gone, delete {self._exclusive}"
            raise self._in_use(self._exclusive, fix) from None
        self._owns_file = True
        os.write(handle, _process_name())
        os.close(handle)

    def _in_use(self, holder: Path, fix: str) -> InputError:
        who = SafeFolder(holder.parent).read(holder.name).decode(errors="replace").strip() or "another process"
        return InputError(f"run folder {self._path.parent} is in use", why=f"{who} writes into it", fix=fix)


def _process_name() -> bytes:
    return f"process {os.getpid()} on {gethostname()}\n".encode()


#: Seconds within which a network file system shows a new file on other hosts.
VISIBLE_WITHIN = 10.0
#: Files that a folder may hold before it has a ``run.json``: locks, and what a killed job had of that file.
_BEFORE = re.compile(r"\.lock(-exclusive)?|\.run\.json\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True)
class OpenedFolder:
    """A run folder with its lock. ``finished`` tells whether an earlier attempt has reached the last step."""

    folder: RunFolder
    lock: FolderLock
    run_id: str
    finished: bool = False


def open_run_folder(run: ResolvedRun, arguments: Sequence[str] = (), base: Path = Path("runs")) -> OpenedFolder:
    """Create or join the run folder of ``run``, and describe this attempt in it. Called by rank 0 or the launcher.

    If ``run.folder`` is unset, the folder is a new ``base/<date>-<time>-<id>``. Raises :class:`InputError` for a folder
    that belongs to another run or job, is no run folder, is a link to elsewhere, or cannot be written.
    """
    wanted = run.config.run.folder
    check_goes_on(run)
    try:
        path = _new_folder(base) if wanted is None else _chosen_folder(wanted)
        lock = FolderLock(path)
        try:
            opened = _enter(path, lock, run, arguments)
        except BaseException:
            lock.release()
            raise
    except OSError as error:
        raise system_limit(error) or InputError(
            f"run folder {wanted or base} cannot be used",
            why=f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}",
            fix="choose another run.folder",
        ) from error
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
    if record is not None:
        _check_same_run(path, record, identity(run), run)


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
    record = SafeFolder(path).read_json("run.json")
    return record is not None and record.get("id") == run_id and len(record["attempts"]) >= attempt


def _new_folder(base: Path) -> Path:
    base.mkdir(parents=True, exist_ok=True)
    while True:
        path = base.absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        with suppress(FileExistsError):  # mkdir decides between jobs that start in one second with equal random parts
            path.mkdir()
            return path


def _chosen_folder(wanted: Path) -> Path:
    path = _follow_sibling_link(wanted.expanduser().absolute())
    _check_entries(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _check_entries(path: Path) -> None:
    """Raise :class:`InputError` for a file, and for a folder of something else than a run."""
    if path.exists() and not path.is_dir():
        raise _refusal(path, "it is a file")
    entries = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if "run.json" not in entries and not all(map(_BEFORE.fullmatch, entries)):
        raise _refusal(path, "it holds other files and no run.json")


def _follow_sibling_link(path: Path) -> Path:
    """Follow a link such as ``runs/latest`` to a run next to it. Raises :class:`InputError` for other links."""
    if not path.is_symlink():
        return path
    target = path.resolve()
    if target.parent != path.parent.resolve():
        raise _refusal(path, f"it is a symbolic link to {target}")
    return target


def _refusal(path: Path, why: str) -> InputError:
    return InputError(f"{path} is not a run folder", why=why, fix="choose a new or an empty run.folder")


def _enter(path: Path, lock: FolderLock, run: ResolvedRun, arguments: Sequence[str]) -> OpenedFolder:
    keys = identity(run)
    files = SafeFolder(path)
    record = _read_record(path)
    if record is None:  # nothing was trained: not yet, or by a job that was killed before the last line below
        record = {"v": 1, "id": secrets.token_hex(16), "digest": digest(keys), "identity": keys, "attempts": []}
        files.write_json("run.json", record)  # before any other file, which alone would make it no run folder
    changed = _check_same_run(path, record, keys, run)
    before = RunFolder(path, max(1, len(record["attempts"])))
    status = before.read_status()
    finished = status is not None and status.state == "finished" and run.request.resume == "auto"
    if finished and LENGTH.isdisjoint(change.key for change in changed):
        return OpenedFolder(before, lock, record["id"], finished=True)
    folder = RunFolder(path, len(record["attempts"]) + 1)
    # A job that was killed before the last line below left this folder, and is no attempt. The lock is held: whatever
    # lies there is nobody's.
    files.make(str(folder.logs.relative_to(path)))
    write_records(folder, run)
    folder.start()
    # Last, and in one rename: other ranks take the attempt for open as soon as run.json has it.
    record["attempts"].append(attempt_record(folder.attempt, run, arguments, changed))
    if changed:
        record |= {"digest": digest(keys), "identity": keys}
    files.write_json("run.json", record)
    return OpenedFolder(folder, lock, record["id"])


def _read_record(path: Path) -> dict[str, Any] | None:
    """The content of ``run.json``, None before the first attempt. Raises :class:`InputError` for what no run writes."""
    record = SafeFolder(path).read_json("run.json")
    if record is None:
        if os.path.lexists(path / "run.json"):
            raise _refusal(path, "its run.json cannot be read")
        return None
    attempts = record.get("attempts")
    sound = isinstance(attempts, list) and all(
        isinstance(each, dict) and isinstance(each.get("changes", {}), dict) for each in attempts
    )
    if not (sound and is_run_id(record.get("id")) and isinstance(record.get("identity", {}), dict)):
        raise _refusal(path, "its run.json is not what a run writes")
    return record if attempts else None


def _check_same_run(path: Path, record: dict[str, Any], keys: dict[str, Any], run: ResolvedRun) -> tuple[Change, ...]:
    """Return what was changed with permission or before a step. Raises :class:`InputError` for all else."""
    check_names(run.request, run)
    before = with_moved_tokenizer(with_added_options(record.get("identity", {}), run), keys, path)
    found = find_changes(before, keys, run.request.allow_plugin_change)
    refusal = find_refusal(found, run.request, path)
    if refusal is not None and has_trained(path):
        raise InputError(f"run folder {path} belongs to another run", why=refusal.why, fix=refusal.fix)
    return found


#: Prefixes of the environment variables that influence a run. Others may hold secrets and are not recorded.
_RECORDED = (
    "CUBLAS_", "CUDA_", "GLIBC_TUNABLES", "GLOO_", "KMP_", "LOCAL_WORLD_SIZE", "MALLOC_", "MASTER_", "MEGATRON_RUN_",
    "MKL_", "NCCL_", "OMP_", "PYTORCH_", "SLURM_JOB", "SLURM_NNODES", "SLURM_NTASKS", "TORCH_", "WORLD_SIZE",
)  # fmt: skip


def write_records(folder: RunFolder, run: ResolvedRun) -> None:
    """Write ``config.yaml``, ``plan.json`` and ``environment.json`` of this attempt."""
    folder.write_record("config.yaml", to_yaml(run))
    folder.write_record("plan.json", plan_record(run))
    folder.write_record("environment.json", environment_record())


def plan_record(run: ResolvedRun) -> dict[str, Any]:
    """Return plugins with versions and digests, the grid of ranks, the layout of layers and the plan of a step."""
    return {"v": 1, **{key: value for key, value in run_record(run).items() if key != "config"}}


def environment_record() -> dict[str, Any]:
    """Return the machine, the interpreter, the installed packages and the recorded environment variables."""
    return {
        "v": 1,
        "host": gethostname(),
        "platform": platform.platform(),
        "python": sys.version,
        "executable": sys.executable,
        "cores": os.cpu_count(),
        "packages": _packages(),
        "variables": {name: text for name, text in sorted(os.environ.items()) if name.startswith(_RECORDED)},
    }


def _packages() -> dict[str, str]:
    """The versions of what is installed, by name. What has none, since its metadata is broken, is left out."""
    versions: dict[str, str] = {}
    for distribution in distributions():
        with suppress(Exception):  # third-party text; importlib_metadata, once imported, raises where it is missing
            described = distribution.metadata  # read once: each of its properties would parse it anew
            if "Name" in described and "Version" in described:
                versions.setdefault(described["Name"], described["Version"])  # the first is imported
    return dict(sorted(versions.items(), key=lambda each: each[0].lower()))


def attempt_record(
    attempt: int, run: ResolvedRun, arguments: Sequence[str], changed: Sequence[Change] = ()
) -> dict[str, Any]:
    """Return the entry of this attempt in ``run.json``, with old and new value of each key that was ``changed``."""
    return {
        "attempt": attempt,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "arguments": list(arguments),
        "folder": str(Path.cwd()),
        "host": gethostname(),
        "process": os.getpid(),
        "ranks": run.sizes.world,
        "git": git_record(),
        "changes": {change.key: [change.before, change.now] for change in changed},
    }


def git_record() -> dict[str, Any] | None:
    """Return the commit of the current folder, and whether tracked files differ from it; None outside a repository.

    The comparison is made from a repository of our own, which borrows the objects and the index of that one: its
    configuration may name programs (filters, ``core.fsmonitor``), and git would run them.
    """
    found = _git({}, "rev-parse", "HEAD", "--show-toplevel", "--git-path", "objects", "--git-path", "index")
    if found is None or found.returncode:
        return None
    commit, tree, objects, index = found.stdout.splitlines()
    with tempfile.TemporaryDirectory(prefix="megatron-run-git-") as ours:
        for folder in ("refs", "objects"):
            Path(ours, folder).mkdir()
        Path(ours, "HEAD").write_text(f"{commit}\n", encoding="ascii")
        Path(ours, "config").write_text("[core]\n\trepositoryformatversion = 0\n", encoding="ascii")
        borrowed = {
            "GIT_DIR": ours,
            "GIT_WORK_TREE": tree,
            "GIT_OBJECT_DIRECTORY": os.path.abspath(objects),  # noqa: PTH100  # a link may lead to a shared store
            "GIT_INDEX_FILE": os.path.abspath(index),  # noqa: PTH100
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_OPTIONAL_LOCKS": "0",  # the index is read and not refreshed
        }
        changed = _git(
            borrowed, "diff", "--quiet", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "HEAD"
        )
    known = changed is not None and changed.returncode in (0, 1)
    return {"commit": commit, "changed": bool(changed.returncode) if changed is not None and known else None}


def _git(variables: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str] | None:
    # What git's own variables say (GIT_EXTERNAL_DIFF, GIT_CONFIG_COUNT) is the user's, and of another command.
    plain = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, timeout=5, env={**plain, **variables}
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
