"""The record of a sweep: ``sweep.json`` in its folder, by which the same command goes on and another is refused."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from shlex import join
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_run.errors import DataError, InputError
from megatron_run.files.run_names import SWEEP_RECORD
from megatron_run.files.safe_folder import SafeFolder, parse_json
from megatron_run_sweep.axes import MAX_RUNS, settings

#: The most bytes of the file.
_LONGEST = 1 << 24
#: Where a sweep lies unless it is told.
FOLDER = Path("runs", "sweep")


class Run(BaseModel):
    """One run: its values, and how its process ended last; None before the first end, and where none ran here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    values: dict[str, str]
    exit_code: int | None = None
    message: str = ""


class Sweep(BaseModel):
    """A sweep as typed, and its runs, of which a sampler adds one at a time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    v: Literal[1] = 1
    configs: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    nproc: int | None = None
    over: tuple[str, ...] = Field((), max_length=MAX_RUNS)
    sampler: Literal["grid", "optuna"] = "grid"
    seed: int = 0
    metric: str = ""
    maximize: bool = False
    runs: tuple[Run, ...] = Field((), max_length=MAX_RUNS)

    @model_validator(mode="after")
    def _sweeps_the_same_keys(self) -> Self:
        if len({frozenset(run.values) for run in self.runs}) > 1:
            raise ValueError("its runs do not have the same keys")
        return self

    @property
    def identity(self) -> Sweep:
        """The sweep itself: all but its runs; the metric only where values are drawn by it."""
        grid = {"metric": "", "maximize": False, "seed": 0} if self.sampler == "grid" else {}
        return self.model_copy(update={"runs": (), **grid})

    @property
    def typed(self) -> str:
        """The command of this sweep, without the folder."""
        words = [*self._words(), *(part for over in self.over for part in ("--over", over))]
        if self.sampler != "grid":
            words += ["--sampler", self.sampler, "--seed", str(self.seed), "--metric", self.metric]
            words += ["--maximize"] * self.maximize
        return join(["megatron-run", "sweep", *words])

    def words(self, values: Mapping[str, str], folder: Path) -> tuple[str, ...]:
        """The words after ``megatron-run`` that train with ``values`` in ``folder``.

        The first is ``train``, so that no other word can be taken for a command.
        """
        more = (*settings(values), f"run.folder={folder}")
        return ("train", *self._words(), *(part for setting in more for part in ("--set", setting)))

    def _words(self) -> tuple[str, ...]:
        words = [*self.configs, *(part for plugin in self.plugins for part in ("--plugin", plugin))]
        words += ["--nproc", str(self.nproc)] if self.nproc else []
        return (*words, *(part for setting in self.sets for part in ("--set", setting)))


def run_name(index: int) -> str:
    """The folder of a run within the sweep's."""
    return f"run-{index:03d}"


def read_sweep(folder: Path) -> Sweep | None:
    """The sweep in ``folder``, None where there is none. Raises :class:`DataError` for a record that is none."""
    try:
        return Sweep.model_validate(parse_json(SafeFolder(folder).read(SWEEP_RECORD, _LONGEST)))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        why = error.strerror or str(error)
    except ValidationError as error:
        why = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:1])
    except ValueError as error:
        why = str(error)
    raise DataError(f"{folder / SWEEP_RECORD} cannot be read", why=why, fix="add --folder NEW to begin another sweep")


def same_sweep(asked: Sweep, folder: Path) -> Sweep:
    """``asked``, with the runs of the record in ``folder`` where it is that sweep.

    Raises :class:`InputError` where the folder holds another one, or runs of which no record says what they are.
    """
    there = read_sweep(folder)
    if there is None:
        _check_no_runs(folder)
        return asked
    if there.identity != asked.identity:
        raise InputError(
            f"{folder} holds another sweep",
            why=there.typed,
            fix=f"type that to go on with it, or {_elsewhere(folder)}",
        )
    return asked.model_copy(update={"runs": there.runs})


def _check_no_runs(folder: Path) -> None:
    """Raise :class:`InputError` for runs in a ``folder`` without a record: they were trained with other values."""
    if found := sorted(path.name for path in folder.glob("run-*")):
        raise InputError(
            f"{folder} holds {found[0]}, and no {SWEEP_RECORD}",
            why="it is unknown with which values that was trained",
            fix=f"{_elsewhere(folder)}, or move it out of the folder",
        )


def _elsewhere(folder: Path) -> str:
    return f"begin yours with --folder {join([f'{folder}-2'])}"


def write_sweep(sweep: Sweep, folder: Path) -> None:
    """Write the record into ``folder``, which is there. Raises :class:`InputError`."""
    try:
        SafeFolder(folder).write_json(SWEEP_RECORD, sweep.model_dump(mode="json"))
    except OSError as error:
        raise cannot_hold(folder, error) from None


def cannot_hold(folder: Path, error: OSError) -> InputError:
    """The message where a sweep cannot use ``folder``."""
    why = error.strerror or str(error)
    return InputError(f"{folder} cannot hold a sweep", why=why, fix="name another: --folder FOLDER")
