"""The phases of a restart after a rank that is there and does nothing: one that hangs, and one that is stopped."""

from __future__ import annotations

import random
import signal
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.restart.phases import FIRST_STEP, Restarted, after_detection, medians, met, restarts
from benchmarks.restart.victims import EVERY, RANKS, Run, running

#: Seconds without progress after which a rank is lost (run.timeout), and within which a hang is to be detected.
TIMEOUT, DETECTION = 8.0, 10.0
#: Runs of each kind, in turns, and the hangs in each.
ROUNDS, HANGS = 3, 2
#: Steps between two that hang.
APART = 3 * EVERY


def hangs(*, quick: bool) -> Iterator[str]:
    """The median of each phase, out of memory."""
    rounds, found = 1 if quick else ROUNDS, {"hang": list[Restarted](), "SIGSTOP": list[Restarted]()}
    for number in range(rounds):
        draw = random.Random(number)
        with tempfile.TemporaryDirectory() as folder:
            with running(Path(folder) / "hang", "memory", fault=_faults(draw), timeout=TIMEOUT) as run:
                found["hang"] += injected(run)
            with running(Path(folder) / "stop", "memory", timeout=TIMEOUT) as run:
                found["SIGSTOP"] += restarts(run, HANGS, draw, signal.SIGSTOP)
    yield (
        f"\n{RANKS} ranks, 50 M parameters, a copy in memory every {EVERY} steps, run.timeout {TIMEOUT:g} s; "
        f"{rounds * HANGS} ranks that hang in their backward, and as many that SIGSTOP stops, in turns. Detection is "
        "from the last sign of life of a rank that hangs, or from the signal.\n"
    )
    yield from medians(found)
    every = [each for kind in found.values() for each in kind]
    slowest = max(each.seconds["detection"] for each in every)
    goals = (
        ("detection, the slowest", f"within {DETECTION:g} s", slowest, DETECTION),
        ("detection to first new step, median", f"within {FIRST_STEP:g} s", after_detection(every), FIRST_STEP),
        ("steps done anew, most", f"at most {EVERY}", max(each.lost for each in every), EVERY),
    )
    yield from met("of both", goals)


def _faults(draw: random.Random) -> str:
    """One hang an attempt, on a rank that ``draw`` chooses."""
    each = ((attempt, draw.randrange(RANKS)) for attempt in range(1, HANGS + 1))
    return ";".join(f"attempt={n},rank={rank},step={n * APART},at=backward,kind=hang" for n, rank in each)


def injected(run: Run) -> Iterator[Restarted]:
    """The restarts after each attempt of ``run`` has hung by itself."""
    for attempt in range(2, HANGS + 2):
        run.wait_for(lambda attempt=attempt: any(row["attempt"] == attempt for row in run.rows()))
        rows = run.rows()
        new = next(index for index, row in enumerate(rows) if row["attempt"] == attempt)
        step = statistics.median(row["step_time_s"] for row in rows[:new] if row["attempt"] == attempt - 1)
        yield Restarted(dict(run.restart(attempt)["seconds"]), rows[new - 1]["step"] + 1 - rows[new]["step"], step)
