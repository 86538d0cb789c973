"""The numbers that a run has left, as columns, as a data frame, or drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_run.errors import InputError
from megatron_run.files.latest_run import follow_latest
from megatron_run.files.safe_folder import SafeFolder
from megatron_run_engine.checkpoint.step_folder import CHECKPOINTS, Checkpoints
from megatron_run_engine.data.user_files import byte_lines
from megatron_run_engine.run_folder.folder import LARGEST, row_of

if TYPE_CHECKING:
    from megatron_run.drawing.sheet import Picture

#: A column: one value for each row, None where a row has none.
Columns = dict[str, list[Any]]


class HasFolder(Protocol):
    """A result, or a history: it knows a run by its folder."""

    @property
    def folder(self) -> Path | None:
        """The run folder, None where nothing is left."""


def folder_of(run: str | Path | HasFolder) -> Path:
    """The folder of ``run``, or the one that it names. Raises :class:`InputError` for a result that has left none."""
    folder = run if isinstance(run, str | Path) else run.folder
    if folder is None:
        raise InputError("the run has left no folder")
    return Path(folder)


class History:
    """Steps and evaluations of the run in ``folder``, read when they are first asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = follow_latest(Path(folder).expanduser())

    @cached_property
    def metrics(self) -> Columns:
        """One row for each step, ``step``, ``loss``, ``lr`` and the others; empty where nothing was written.

        A step that was repeated counts once, as it was last.
        """
        return _columns(self.folder / "metrics.jsonl")

    @cached_property
    def evaluations(self) -> Columns:
        """One row for each evaluation of a split or task: ``step``, ``split``, ``loss`` and the others."""
        return _columns(self.folder / "eval.jsonl")

    @property
    def losses(self) -> list[float | None]:
        """The loss of each step; None where it was not finite."""
        return self.metrics.get("loss", [])

    @property
    def best(self) -> Path | None:
        """The saved step with the lowest validation loss, the newest where none was evaluated; None without any."""
        checkpoints = Checkpoints(self.folder / CHECKPOINTS)
        saved = checkpoints.steps()
        found = self.evaluations
        losses, steps = found.get("loss", []), found.get("step", [])
        splits = found.get("split", ["validation"] * len(steps))  # the losses of a task are of other text
        scored = [
            (loss, -step)
            for loss, step, split in zip(losses, steps, splits, strict=False)
            if isinstance(loss, float) and step in saved and split in ("validation", None)
        ]
        step = -min(scored)[1] if scored else saved[-1] if saved else None
        return None if step is None else checkpoints.folder(step)

    def plot(self, *others: str | Path | HasFolder, names: Sequence[str] = ()) -> Picture:
        """Loss, learning rate, gradient norm and throughput as a picture, or the curves ``names``; which it can save.

        ``others`` are runs to compare with, by their folders or results. A name is a field of ``metrics.jsonl``, or
        SPLIT.NAME of ``eval.jsonl``, as ``validation.loss``. Raises :class:`InputError`.
        """
        from megatron_run_engine.run_folder.plotting import plot  # nothing that training needs

        return plot([self.folder, *map(folder_of, others)], names)

    def frame(self) -> Any:
        """:attr:`metrics` as a data frame of pandas, by step. Raises :class:`InputError` without pandas."""
        try:
            import pandas as pd  # type: ignore[import-untyped,unused-ignore]  # an extra of the user's
        except ModuleNotFoundError as missing:
            raise InputError("a data frame needs pandas", fix="pip install pandas, or take the columns") from missing
        frame = pd.DataFrame(self.metrics)
        return frame.set_index("step") if "step" in frame else frame


def _columns(path: Path) -> Columns:
    try:
        content = SafeFolder(path.parent).read(path.name, limit=LARGEST)
    except FileNotFoundError:
        content = b""
    except OSError as error:
        raise InputError(f"{path} cannot be read", why=error.strerror or str(error)) from error
    lines = byte_lines(content[: content.rfind(b"\n") + 1])  # a killed run leaves half a line at the end
    read = (_row(path, number, line) for number, line in enumerate(lines, 1))
    # A line without a loss says what was changed before a step, in folders of early versions.
    # Evaluations of one step differ in their split or task.
    rows = {(row["step"], str(row.get("split"))): row for row in read if "changes" not in row or "loss" in row}
    ordered = sorted(rows.values(), key=lambda row: row["step"])
    names = dict.fromkeys(name for row in ordered for name in row if name not in ("resumed", "changes"))
    return {name: [row.get(name) for row in ordered] for name in names}


def _row(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    found = row_of(line)
    if found is None:
        raise InputError(f"line {number} of {path} is damaged", why="it is no JSON object with the number of a step")
    return found
