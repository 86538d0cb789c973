"""What of a run is saved once it has ended, and what to type to go on from there."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from megatron_run_engine.checkpoint.step_folder import CHECKPOINTS, Checkpoints
from megatron_run_engine.launch.failure import one_line


def last_saved(folder: Path | None) -> int | None:
    """The newest step that the run in ``folder`` has saved; None where there is none."""
    steps = Checkpoints(folder / CHECKPOINTS).steps() if folder is not None else []
    return steps[-1] if steps else None


def how_to_go_on(folder: Path) -> str:
    """What to type, whatever folder and step the run was started with."""
    return f"to go on from it, run the same command with --set {quote(f'run.folder={folder}')} --resume auto"


def interrupted(how: str, folder: Path | None) -> str:
    """The line of a run that SIGINT ended, which is ``how`` in a word: unlike the other signals it saves nothing."""
    step = last_saved(folder)
    if folder is None or step is None:
        return f"{how}, which saves nothing: no step was saved before"
    return f"{how}, which saves nothing: step {step} was saved last; {how_to_go_on(folder)}"


def last_line(error: BaseException, folder: Path | None) -> str:
    """What the user is told when ``error`` ends the run in ``folder``."""
    line = one_line(error)
    return interrupted(line, folder) if isinstance(error, KeyboardInterrupt) else line
