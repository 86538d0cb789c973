"""The phases of a restart, from the kill of a rank to the first new step."""

from __future__ import annotations

import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.restart.victims import EVERY, RANKS, WAYS, Run, running
from benchmarks.support.report import table
from megatron_run_engine.run_folder.restart_times import PHASES

#: Runs of each way, in turns, so that what else the machine does falls on all; and the kills in each.
ROUNDS, KILLS = 4, 2
DETECTION, FIRST_STEP = 1.0, 5.0


class Restarted(NamedTuple):
    """A restart: the seconds of each phase, from the kill to the first new step, and the steps that were done anew."""

    seconds: dict[str, float]
    lost: int
    step: float


def restarts(run: Run, kills: int, draw: random.Random, number: signal.Signals = signal.SIGKILL) -> Iterator[Restarted]:
    """Send a signal to a rank so many times, each after some steps of the attempt, at a random moment of a step."""
    for attempt in range(2, kills + 2):
        begun = len(run.rows())
        run.wait_for(lambda begun=begun: len(run.rows()) >= begun + EVERY + 2)
        step = statistics.median(row["step_time_s"] for row in run.rows()[begun + 1 :])
        time.sleep(draw.random() * step)
        done, killed = run.strike_one(draw, number)
        run.wait_for(lambda attempt=attempt: run.rows()[-1]["attempt"] == attempt)
        record, rows = run.restart(attempt), run.rows()
        seconds = {**record["seconds"], "detection": record["marks"]["detected"] - killed}
        new = next(row["step"] for row in rows if row["attempt"] == attempt)
        yield Restarted(seconds, rows[done - 1]["step"] + 1 - new, step)


def medians(found: Mapping[str, Sequence[Restarted]]) -> Iterator[str]:
    """The table of the median of each phase, with a column for each way that was ``found``."""
    rows = [
        (phase.replace("_", " "), *(_median([each.seconds[phase] for each in found[way]]) for way in found))
        for phase in PHASES.values()
    ]
    whole = {way: [sum(each.seconds.values()) for each in found[way]] for way in found}
    rows.append(("loss to first new step", *(_median(whole[way]) for way in found)))
    rows.append(("... the slowest", *(f"{max(whole[way]):.2f}" for way in found)))
    rows.append(("steps done anew, most", *(str(max(each.lost for each in found[way])) for way in found)))
    rows.append(("a step", *(_median([each.step for each in found[way]]) for way in found)))
    yield from table(("seconds, median", *found), rows)


def met(what: str, goals: Sequence[tuple[str, str, float, float]]) -> Iterator[str]:
    """The table of ``goals``: a name, words, what was measured, and the limit."""
    rows = ((name, goal, f"{value:.2f}", "yes" if value <= limit else "no") for name, goal, value, limit in goals)
    yield ""
    yield from table((what, "goal", "measured", "met"), rows)


def after_detection(found: Sequence[Restarted]) -> float:
    """The median seconds from the detection to the first new step."""
    return statistics.median(sum(each.seconds.values()) - each.seconds["detection"] for each in found)


def phases(*, quick: bool) -> Iterator[str]:
    """The median of each phase, for each way to save."""
    rounds, found = 1 if quick else ROUNDS, {way: list[Restarted]() for way in WAYS}
    for number in range(rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "run", way) as run:
                found[way] += restarts(run, KILLS, random.Random(number))
    yield f"\n{RANKS} ranks, 50 M parameters, saved every {EVERY} steps; {rounds * KILLS} kills each way, in turns.\n"
    yield from medians(found)
    memory = found["memory"]
    slowest, anew = max(each.seconds["detection"] for each in memory), max(each.lost for each in memory)
    goals = (
        ("detection, the slowest", f"below {DETECTION:g} s", slowest, DETECTION),
        ("detection to first new step, median", f"within {FIRST_STEP:g} s", after_detection(memory), FIRST_STEP),
        ("steps done anew, most", f"at most {EVERY}", anew, EVERY),
    )
    yield from met("out of memory", goals)


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}"
