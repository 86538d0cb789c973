"""All that a run folder tells, as data: whatever is missing, early or damaged there is empty here."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

from megatron_run.config.values import leaves
from megatron_run.config.yaml import bare, parse
from megatron_run.errors import InputError, RunError
from megatron_run.errors.wording import near_path
from megatron_run.files.latest_run import follow_latest
from megatron_run.files.run_names import SWEEP_RECORD, shown_name
from megatron_run.files.safe_folder import SafeFolder
from megatron_run_engine.checkpoint.step_folder import CHECKPOINTS, Checkpoints
from megatron_run_engine.data.user_files import byte_lines
from megatron_run_engine.run_folder.curves import Thinned, read_evaluations, read_metrics, read_rows
from megatron_run_engine.run_folder.folder import RunFolder, Status, last_config

#: What makes a folder that of a run: each run has one of them at least, those of early versions too.
_SIGNS = ("run.json", "status.json", "metrics.jsonl")
#: The most attempts, newest first, whose logs are read, the bytes of each from its end, and the lines that are shown.
ATTEMPTS, LOG_BYTES, LOG_LINES = 20, 1 << 18, 80
#: The most samples, the newest, and saved steps.
SAMPLES, SAVED = 12, 20
#: A line of the console about a step, which the curves show.
_PROGRESS = re.compile(rb"step +\d+/\d+  ")


@dataclass(frozen=True)
class Attempt:
    """One start of a run: what ``run.json`` says of it, and the lines of rank 0's log that are about no single step.

    ``left_out`` says that the log has more.
    """

    number: int
    entry: Mapping[str, Any]
    lines: tuple[str, ...]
    left_out: bool


@dataclass(frozen=True)
class Saved:
    """A saved step: bytes and time as its manifest has them, or why it cannot be read."""

    step: int
    size: int | None = None
    time: str = ""
    problem: str = ""


class Record:
    """The run in ``folder``, which may be ``runs/latest``; its files are read when they are first asked for.

    Raises :class:`InputError` where there is no run, here and where a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = follow_latest(folder.expanduser())
        if not any(os.path.lexists(self.folder / sign) for sign in _SIGNS):
            if (self.folder / SWEEP_RECORD).is_file():
                fix = f"type: megatron-run sweep --table --folder {quote(str(folder))}"
                raise InputError(f"{folder} is a sweep", why="none of its runs has begun", fix=fix)
            raise InputError(
                f"there is no run in {folder}",
                why=self._without_run(),
                fix=near_path(self.folder) or "name a run folder, as runs/first",
            )
        self._files = SafeFolder(self.folder)
        self.time = time.time()

    def _without_run(self) -> str:
        if self.folder.is_dir():
            return "it has no run.json"
        return "it is a file" if self.folder.is_file() else "there is no such folder"

    @property
    def name(self) -> str:
        """The name of the run where several are shown."""
        return shown_name(self.folder)

    @cached_property
    def status(self) -> Status | None:
        """The state of the run, None where nothing tells it."""
        return RunFolder(self.folder, 1).read_status()

    @cached_property
    def metrics(self) -> Thinned:
        """The curves of its steps."""
        return read_metrics(self.folder)

    @cached_property
    def evaluations(self) -> Mapping[str, Thinned]:
        """The curves of its evaluations, by split or task."""
        return read_evaluations(self.folder)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """``plan.json``."""
        return self._files.read_json("plan.json") or {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """``environment.json``."""
        return self._files.read_json("environment.json") or {}

    @cached_property
    def device(self) -> dict[str, Any]:
        """``device.json``."""
        return self._files.read_json("device.json") or {}

    @cached_property
    def config_text(self) -> str:
        """The configuration of the newest attempt as it was written."""
        saved = last_config(self.folder)
        return saved.text if saved else ""

    @cached_property
    def keys(self) -> dict[str, Any]:
        """Every key of the configuration with its value; empty where it cannot be read."""
        try:
            found = {name: bare(node) for name, node in parse(self.config_text, "config.yaml").items()}
        except RunError:
            return {}
        return {".".join(key): value for key, value in leaves(found)}

    @cached_property
    def samples(self) -> list[Mapping[str, Any]]:
        """The newest texts that the model wrote: ``step``, ``attempt``, ``text``."""
        return read_rows(self.folder, "samples.jsonl", SAMPLES)

    @cached_property
    def attempts(self) -> list[Attempt]:
        """The starts of the run, the newest first."""
        listed = (self._files.read_json("run.json") or {}).get("attempts")
        entries = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        return [
            Attempt(number, entry, *self._log(number))
            for number, entry in [*enumerate(entries, 1)][: -ATTEMPTS - 1 : -1]
        ]

    def _log(self, attempt: int) -> tuple[tuple[str, ...], bool]:
        """The last lines of rank 0's log that are about no single step, and whether there are more."""
        name = f"logs/attempt-{attempt:03d}/rank-00000.log"
        try:
            with os.fdopen(self._files.open(name, os.O_RDONLY), "rb") as file:
                start = max(0, os.fstat(file.fileno()).st_size - LOG_BYTES)
                file.seek(start)
                lines = byte_lines(file.read(LOG_BYTES))[1 if start else 0 :]
        except OSError:
            return (), False
        kept = [line for line in lines if line.strip() and not _PROGRESS.match(line)]
        texts = (line.decode(errors="replace") for line in kept[-LOG_LINES:])
        return tuple(texts), bool(start) or len(kept) > LOG_LINES

    @cached_property
    def saved(self) -> list[Saved]:
        """The newest of the saved steps that are there, the newest first."""
        checkpoints = Checkpoints(self.folder / CHECKPOINTS)
        return [_saved(checkpoints, step) for step in checkpoints.steps()[: -SAVED - 1 : -1]]

    def holds(self, path: Path) -> bool:
        """Whether ``path`` is a file of the run, which may never become a report; its other pages may."""
        place = path.resolve()
        return place.is_file() and place.is_relative_to(self.folder.resolve()) and path.suffix != ".html"

    @property
    def state(self) -> str:
        """The state in words: ``finished``, or how long ago a run that seems to go on has given a sign of life."""
        if self.status is None:
            return "unknown"
        state, beat = str(self.status.state), self.status.heartbeat
        if state not in ("running", "starting") or not isinstance(beat, int | float):
            return state
        return f"{state}, last sign of life {max(0.0, self.time - beat):.0f} s before this report"


def _saved(checkpoints: Checkpoints, step: int) -> Saved:
    try:
        manifest = checkpoints.manifest(step)
    except RunError as error:
        return Saved(step, problem=str(error))
    return Saved(step, manifest.size, manifest.about.time)
