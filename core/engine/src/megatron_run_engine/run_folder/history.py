"""The numbers that a run has left in its folder (``observer=jsonl``), as columns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_run.errors import InputError
from megatron_run.safe_folder import SafeFolder, parse_json
from megatron_run_engine.checkpoint.step_folder import CHECKPOINTS, Checkpoints

#: The most bytes of numbers that are read: those of millions of steps.
LARGEST = 1 << 32
#: A column: one value for each row, None where a row has none.
Columns = dict[str, list[Any]]


class History:
    """Steps and evaluations of the run in ``folder``, read when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def metrics(self) -> Columns:
        """One row for each step, ``step``, ``loss``, ``lr`` and the others; empty where nothing was written.

        A step that was repeated counts once, as it was last.
        """
        return _columns(self.folder / "metrics.jsonl")

    @cached_property
    def evaluations(self) -> Columns:
        """One row for each evaluation: ``step``, ``loss``, ``perplexity`` and the others."""
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
        found = zip(self.evaluations.get("loss", []), self.evaluations.get("step", []), strict=False)
        scored = [(loss, -step) for loss, step in found if isinstance(loss, float) and step in saved]
        step = -min(scored)[1] if scored else saved[-1] if saved else None
        return None if step is None else checkpoints.folder(step)

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
    lines = content[: content.rfind(b"\n") + 1].splitlines()  # a killed run leaves half a line at the end
    read = (_row(path, number, line) for number, line in enumerate(lines, 1))
    rows = {row["step"]: row for row in read if "changes" not in row}  # a changed configuration is no step
    ordered = [rows[step] for step in sorted(rows)]
    names = dict.fromkeys(name for row in ordered for name in row)
    return {name: [row.get(name) for row in ordered] for name in names}


def _row(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    """A line with what plugins have added among the other numbers."""
    try:
        row = parse_json(line)
        found = {**{name: value for name, value in row.items() if name != "extra"}, **row.get("extra", {})}
        whole = "changes" in found or type(found["step"]) is int
    except (ValueError, TypeError, AttributeError, KeyError):
        whole = False
    if not whole:
        raise InputError(f"line {number} of {path} is damaged", why="it is no JSON object with the number of a step")
    return found
