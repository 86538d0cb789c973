"""Disks that stop and bytes that flip: every point of several saves, and every kind of file of a saved step."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import count as numbers
from pathlib import Path

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from tests.campaigns.figures import Figures, campaign, some
from tests.campaigns.kills import LAST, request
from tests.engine.checkpoint.test_checkpoint_crashes import Recorded, fault
from tests.support.crashes import ends, materialise
from tests.support.forked import run_forked


def crash_points(folder: Path, share: float = 1.0) -> Figures:
    """Stop saving after each change of the disk, in each way in which a process or a machine can end."""
    (folder / "recorded").mkdir()
    recorded, name = Recorded(folder / "recorded", (10, 20, 30, 40)), numbers()
    states = list(ends(recorded.changes))

    def trial(index: int) -> Sequence[str]:
        done, label, tree = states[index]
        path = folder / str(next(name))
        materialise(tree, path)
        found = fault(Checkpoints(path / "checkpoints"), recorded, done)
        return [f"after {done} changes, {label}: {found}"] if found else []

    figures = campaign("a save stopped at a point: what was committed is there", trial, some(len(states), share))
    figures.notes.append(f"{len(recorded.changes)} changes of the disk, by a kill and by a loss of power")
    return figures


def flips(folder: Path, count: int, seed: int) -> Figures:
    """Change one byte of some file of a step that four ranks saved; it is found, and the file is named."""
    assert run_forked(request(folder / "run")).code == 0
    checkpoints = Checkpoints(folder / "run" / "checkpoints")
    files = sorted(checkpoints.folder(LAST).iterdir())

    def trial(each: int) -> Sequence[str]:
        draw = random.Random(each)
        file = draw.choice(files)
        place, mask = draw.randrange(file.stat().st_size), draw.randint(1, 255)
        with file.open("r+b", buffering=0) as content:
            (byte,) = os.pread(content.fileno(), 1, place)
            os.pwrite(content.fileno(), bytes([byte ^ mask]), place)
            said = refusal(checkpoints)
            os.pwrite(content.fileno(), bytes([byte]), place)
        return [] if str(file) in said else [f"byte {place} of {file.name}: {said or 'nobody saw it'}"]

    figures = campaign("a byte flipped: found, and the file named", trial, range(seed, seed + count))
    checkpoints.verify(LAST)
    figures.notes.append(f"in {len(files)} files of {sum(file.stat().st_size for file in files)} bytes")
    return figures


def refusal(checkpoints: Checkpoints) -> str:
    """What is said of the last step; empty when it is found intact."""
    try:
        checkpoints.verify(LAST)
    except CheckpointError as error:
        return str(error)
    return ""
