"""SIGTERM at any moment: the step is finished and saved in time, and the run goes on bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_run.config.request import Request
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from tests.campaigns.figures import Figures, campaign
from tests.support.forked import ForkedRun, learned, run_forked, saved_bits, tiny
from tests.support.processes import wait_until

LAST = 60
#: Seconds in which a run must have ended after the signal; a scheduler gives thirty.
IN_TIME = 10.0


def request(folder: Path) -> Request:
    """Two ranks, every second step saved."""
    return tiny(folder, {"train.steps": LAST, "checkpoint.interval": 2}, nproc=2)


class Stops:
    """Trials against one run that nothing disturbed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        whole = folder / "whole"
        assert run_forked(request(whole)).code == 0
        self._learned, self._bits = learned(whole), saved_bits(whole, LAST)
        self.seconds: list[float] = []

    def trial(self, seed: int) -> Sequence[str]:
        """Stop a run once it has begun to step; what was not as promised. One that was too late is tried again."""
        draw = random.Random(seed)
        while True:
            folder = self._folder / f"run-{seed}"
            with ForkedRun(request(folder)) as run:
                wait_until(partial(learned, folder), 60)
                time.sleep(draw.uniform(0.0, 0.15))
                sent = time.monotonic()
                run.signal(signal.SIGTERM)
                stopped = run.wait()
            seconds = time.monotonic() - sent
            if max(learned(folder)) < LAST:
                break
            shutil.rmtree(folder)
        self.seconds.append(seconds)
        faults = [] if stopped.code == 143 else [f"exit code {stopped.code}: {stopped.message}"]
        faults += [f"it took {seconds:.1f} s"] if seconds > IN_TIME else []
        faults += self._after(folder)
        shutil.rmtree(folder)
        return [f"seed {seed}: {each}" for each in faults]

    def _after(self, folder: Path) -> list[str]:
        """What is wrong with what was saved, and with how it goes on."""
        checkpoints = Checkpoints(folder / "checkpoints")
        newest, done = checkpoints.newest(), max(learned(folder))
        if newest != done:
            return [f"step {done} was done, step {newest} is saved"]
        ended = run_forked(request(folder))
        same = not ended.code and saved_bits(folder, LAST) == self._bits and learned(folder) == self._learned
        return [] if same else ["it did not go on as if nothing had been"]


def stops(folder: Path, count: int, seed: int, jobs: int) -> Figures:
    """So many signals, each with the continuation."""
    trials = Stops(folder)
    figures = campaign(
        "SIGTERM at random: the step done is saved, exit code 143, the run goes on bit for bit",
        trials.trial,
        range(seed, seed + count),
        jobs,
    )
    figures.notes.append(f"saved and gone within {max(trials.seconds):.1f} s")
    return figures
