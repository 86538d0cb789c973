"""The paths in a run folder, and ``status.json``, which reports the run's state."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megatron_run.errors import CheckpointError, ExitCode, InputError, RunError
from megatron_run.errors.machine_limits import system_limit
from megatron_run.files.latest_run import is_unnamed, point_latest_at
from megatron_run.files.safe_folder import SafeFolder, parse_json

if TYPE_CHECKING:
    from megatron_run_engine.run_folder.changes import Change

State = Literal["starting", "running", "finished", "stopped", "failed"]

#: Seconds between two heartbeats: often enough to notice a hang, rare enough for a network file system.
HEARTBEAT = 1.0
#: The most bytes of numbers that are read: those of millions of steps.
LARGEST = 1 << 32
#: What describes a run as it now is: that of its newest attempt, which also lies in the folder of the attempt's logs.
DESCRIPTION = ("config.yaml", "plan.json", "environment.json")
#: What says that an attempt is open, and what it changes of the run once nothing refuses it.
ATTEMPT = "attempt.json"


def is_run_id(value: object) -> bool:
    """Whether ``value`` is the identifier of a run, which becomes a part of folders' names."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


class SavedConfig(NamedTuple):
    """A configuration in a run folder: where it lies, and its text."""

    path: Path
    text: str


def last_config(folder: Path) -> SavedConfig | None:
    """The configuration of the run in ``folder``, or the one beside an import; None without any.

    It is that of the newest attempt. Early versions left that of the first one in the run folder, and have no
    ``logs/attempt-001/config.yaml``. Links are passed over.
    """
    files = SafeFolder(folder)
    attempts = [path.name for path in folder.glob("logs/attempt-*") if path.name[8:].isdecimal()]
    attempts.sort(key=lambda name: int(name[8:]), reverse=True)
    early = not os.path.lexists(folder / "logs" / "attempt-001" / "config.yaml")
    for name in (*(f"logs/{attempt}/config.yaml" for attempt in attempts if early), "config.yaml"):
        with suppress(OSError):
            return SavedConfig(folder / name, files.read(name).decode(errors="replace"))
    return None


def unusable(path: Path, error: OSError) -> RunError:
    """The message where a call that reads or writes in the run folder ``path`` raises ``error``."""
    return system_limit(error) or InputError(
        f"run folder {path} cannot be used",
        why=f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}",
        fix="choose another run.folder",
    )


def open_log(log: Path, flags: int = os.O_WRONLY | os.O_APPEND | os.O_CREAT) -> int:
    """Open what :meth:`RunFolder.log` names, by a descriptor of the run folder. Raises OSError where a link lies."""
    return SafeFolder(log.parents[2]).open("/".join(log.parts[-3:]), flags)


@dataclass(frozen=True)
class Status:
    """The content of ``status.json``.

    ``heartbeat`` is the time of writing in seconds since the epoch. ``exit_code`` and ``retry`` (whether the same
    command may succeed if it is run again) are None until the attempt has ended.
    """

    state: State
    step: int
    attempt: int
    heartbeat: float
    exit_code: int | None = None
    retry: bool | None = None
    message: str = ""


class RunFolder:
    """A run folder as ``rank`` sees it in one attempt. Every rank may call every method; only rank 0 writes."""

    def __init__(self, path: Path, attempt: int, rank: int = 0) -> None:
        self.path = path
        self.attempt = attempt
        self.rank = rank
        self.files = SafeFolder(path)
        self._beat = 0.0
        self._step = 0
        self._stepped = False

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r}, attempt={self.attempt})"

    @property
    def logs(self) -> Path:
        """The folder of this attempt's logs, ``logs/attempt-001``."""
        return self.path / "logs" / f"attempt-{self.attempt:03d}"

    def log(self, rank: int) -> Path:
        """Return the log of ``rank``, ``logs/attempt-001/rank-00003.log``."""
        return self.logs / f"rank-{rank:05d}.log"

    @property
    def checkpoints(self) -> Path:
        """The folder of the steps that all attempts saved."""
        from megatron_run_engine.checkpoint.step_folder import CHECKPOINTS  # much, which a rank's log does without

        return self.path / CHECKPOINTS

    @property
    def run_id(self) -> str:
        """The run's identifier in ``run.json``, 32 hexadecimal digits; ``unnamed`` without that file."""
        record = self.files.read_json("run.json") or {}
        return str(record["id"]) if is_run_id(record.get("id")) else "unnamed"

    @property
    def changed_keys(self) -> frozenset[str]:
        """The configuration keys that any attempt was allowed to change."""
        attempts = (self.files.read_json("run.json") or {}).get("attempts", [])
        return frozenset(key for attempt in attempts for key in attempt.get("changes", {}))

    @property
    def attempts_begun(self) -> Mapping[int, int]:
        """From which step each attempt went on, of those that nothing refused."""
        attempts = (self.files.read_json("run.json") or {}).get("attempts", [])
        return {each["attempt"]: each["step"] for each in attempts if {"attempt", "step"} <= each.keys()}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within: what is refused in this folder, whoever reads or writes there, raises what :func:`unusable` says."""
        try:
            yield
        except OSError as error:
            if not (isinstance(error.filename, str) and Path(error.filename).is_relative_to(self.path)):
                raise
            raise unusable(self.path, error) from error

    @property
    def records(self) -> str:
        """The folder of what describes this attempt, by its name in the run folder."""
        return self.logs.relative_to(self.path).as_posix()

    def write_record(self, name: str, content: Any) -> None:
        """Write a part of this attempt's description; ``content`` is text, or what becomes JSON."""
        where = f"{self.files.make(self.records).relative_to(self.path)}/{name}"
        if isinstance(content, str):
            self.files.replace(where, content.encode())
        else:
            self.files.write_json(where, content)

    def show_record(self, name: str) -> None:
        """Let a part of this attempt's description be that of the run."""
        self.files.replace(name, self.files.read(f"{self.records}/{name}"))

    @property
    def begun(self) -> bool:
        """Whether nothing refuses this attempt any more."""
        return bool((self.files.read_json(f"{self.records}/{ATTEMPT}") or {}).get("begun"))

    def begin(self, step: int, changes: Iterable[Change] = ()) -> None:
        """Make this attempt, which goes on from ``step``, what the run is: nothing refuses it any more.

        Before, nothing in the folder says that the run has changed: a refusal leaves it as it was. ``changes`` are
        those of contents, which no configuration shows.
        """
        self._step = step
        if self.rank:
            return
        prepared = self.files.kept_json(f"{self.records}/{ATTEMPT}")
        if prepared:  # else nobody has opened the folder: it is a scratch folder
            found = prepared["entry"]["changes"] | {change.key: [change.before, change.now] for change in changes}
            prepared |= {"entry": prepared["entry"] | {"step": step, "changes": found}, "begun": True}
            self.publish(prepared)
            self.write_record(ATTEMPT, prepared)
        self._write(Status("starting", step, self.attempt, time.time()))

    def publish(self, prepared: Mapping[str, Any]) -> None:
        """Let the run be what the ``prepared`` record of this attempt says; ``run.json`` comes last, in one rename."""
        self._keep_first()
        shown = {}
        try:
            for name in DESCRIPTION:
                with suppress(FileNotFoundError):
                    shown[name] = self.files.read(name)
                self.show_record(name)
            self._list(prepared, prepared["becomes"])
        except OSError:  # the run is what it was
            for name, content in shown.items():
                with suppress(OSError):
                    self.files.replace(name, content)
            raise

    def _list(self, prepared: Mapping[str, Any], becomes: Mapping[str, Any]) -> None:
        """Add this attempt to ``run.json`` unless it has it, with what the run ``becomes`` by it."""
        record = self.files.kept_json("run.json")
        others = record.get("attempts", [])[: self.attempt - 1]
        entry = dict(prepared["entry"])
        self.files.write_json("run.json", record | {"attempts": [*others, entry]} | dict(becomes))

    def _keep_first(self) -> None:
        """Keep the description of the first attempt, which early versions wrote into the run folder alone."""
        for name in DESCRIPTION if self.attempt > 1 else ():
            kept = f"logs/attempt-001/{name}"
            with suppress(FileNotFoundError):
                if not os.path.lexists(self.path / kept):
                    self.files.make("logs/attempt-001")
                    self.files.replace(kept, self.files.read(name))

    def read_status(self) -> Status | None:
        """Return the content of ``status.json``, or None if it cannot be read."""
        content = self.files.read_json("status.json")
        try:
            return Status(**content) if content else None
        except TypeError:
            return None

    def heartbeat(self, step: int) -> None:
        """Report that ``step`` has ended. Writes to the disk at most once a second.

        The first one makes the run the latest, if its user did not name it: before, there was nothing to look at.
        """
        if not self._stepped and self.rank == 0 and is_unnamed(self.path):
            point_latest_at(self.path)
        self._step, self._stepped = step, True
        if time.time() - self._beat >= HEARTBEAT:
            with suppress(OSError):  # a full disk must not end a training that saves only now and then
                self.flush()

    def flush(self) -> None:
        """Write the last heartbeat now."""
        self._beat = time.time()
        self._write(Status("running" if self._stepped else "starting", self._step, self.attempt, self._beat))

    def start(self) -> None:
        """Report that this attempt begins; the step is the last one that the run has saved."""
        from megatron_run_engine.checkpoint.step_folder import Checkpoints

        saved = Checkpoints(self.checkpoints).steps()
        self._write(Status("starting", saved[-1] if saved else 0, self.attempt, time.time()))

    def end(self, code: ExitCode, message: str = "") -> None:
        """Report how this attempt ended. The step is the one of the last heartbeat.

        Raises :class:`CheckpointError` when the folder is not there any more, or cannot be written.
        """
        last = self.read_status() or Status("starting", 0, self.attempt, 0.0)
        stopped = code in (ExitCode.SIGINT, ExitCode.SIGTERM, ExitCode.TIME_LIMIT)
        state: State = "finished" if code == ExitCode.DONE else "stopped" if stopped else "failed"
        final = replace(last, state=state, attempt=self.attempt, heartbeat=time.time(), message=message)
        try:
            self._list_ended()
            self._write(replace(final, exit_code=int(code), retry=code.retry))
        except FileNotFoundError as cause:
            raise CheckpointError(
                f"the run folder {self.path} is gone",
                why="it was moved or deleted while the run was in it, so how the run ended is not recorded",
                fix="resume with run.folder where it is now; leave it in its place until a run has ended",
            ) from cause
        except OSError as cause:
            raise CheckpointError(
                f"how the run in {self.path} ended is not recorded",
                why=f"{cause.strerror}: {cause.filename}",
                fix="once the folder can be written, the same command goes on",
            ) from cause

    def refuse(self, code: ExitCode, message: str) -> None:
        """Report in the status of an earlier attempt, if there is one, why the run was not gone on with.

        Scripts decide by it whether to try again: what torchrun returns is always the same. The run's state stays.
        """
        last = self.read_status()
        if last is not None:
            state = "failed" if last.exit_code is None else last.state  # of a job that was killed
            with suppress(OSError):
                self._write(replace(last, state=state, exit_code=int(code), retry=code.retry, message=message))

    def _list_ended(self) -> None:
        """Let ``run.json`` have this attempt though it has not begun, so that the next one gets another number."""
        attempts = self.files.kept_json("run.json").get("attempts", [])
        prepared = self.files.kept_json(f"{self.records}/{ATTEMPT}")
        if self.rank == 0 and prepared and len(attempts) < self.attempt:
            self._list(prepared | {"entry": prepared["entry"] | {"changes": {}}}, {})

    def _write(self, status: Status) -> None:
        if self.rank == 0:
            self.files.write_json("status.json", asdict(status))


def row_of(line: bytes) -> Mapping[str, Any] | None:
    """A line of numbers, with what plugins have added among the others; None where it is damaged."""
    try:
        row = parse_json(line)
        found = {**{name: value for name, value in row.items() if name != "extra"}, **row.get("extra", {})}
        whole = "changes" in found or type(found["step"]) is int
    except (ValueError, TypeError, AttributeError, KeyError):
        whole = False
    return found if whole else None
