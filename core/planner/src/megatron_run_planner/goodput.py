"""The yield of a long run: failures, saves, restarts and stragglers, by a seeded simulation and in closed form.

A run computes for an *interval*, saves for a *stall*, and repeats. A failure of any device loses the work since the
last save and costs a *restart*. Failures are a Poisson process (exponential times between them).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, sqrt
from random import Random
from statistics import NormalDist, fmean, quantiles

from megatron_run.errors import InputError

#: Saves and failures that are simulated, of all runs together, and the fewest runs.
_EVENTS, _FEWEST = 3_000_000, 20


@dataclass(frozen=True)
class Conditions:
    """Seconds: ``mtbf`` between failures of one of ``devices``, ``stall`` of a save, ``restart`` after a failure.

    ``spread`` is the standard deviation of one machine's step time, as a fraction of it; all ``machines`` wait for the
    slowest.
    """

    devices: int
    machines: int
    mtbf: float
    stall: float
    restart: float
    spread: float = 0.0

    @property
    def between_failures(self) -> float:
        """Seconds between failures of the whole run."""
        return self.mtbf / self.devices

    @property
    def straggling(self) -> float:
        """By how much the slowest machine makes a step longer: the mean largest of normal draws (Blom 1958)."""
        if self.machines == 1:
            return 1.0
        return 1 + self.spread * NormalDist().inv_cdf((self.machines - 0.375) / (self.machines + 0.25))


#: Mean times between failures after which no interval ever ends.
_NEVER = 500.0


@dataclass(frozen=True)
class Yield:
    """Shares of the wall time of a run with saves every ``interval`` seconds; ``low`` and ``high`` hold 90% of trials.

    ``useful`` is the time in which steps were made that were kept, at the speed of a run without stragglers.
    """

    interval: float
    useful: float
    low: float
    high: float
    saving: float
    lost: float
    restarting: float
    straggling: float
    failures: float


def young_daly(conditions: Conditions) -> float:
    """The interval that wastes least, to first order: sqrt(2 stall M) (Young 1974; Daly 2006, equation 1)."""
    return sqrt(2 * conditions.stall * conditions.between_failures)


def expected_useful(conditions: Conditions, interval: float) -> float:
    """The share of the wall time in which kept work is done (Daly 2006, equation 13), stragglers aside.

    Work of one interval takes M e^(R/M) (e^((interval + stall)/M) - 1) of wall time, failures during restarts included.
    """
    mean = conditions.between_failures
    if (interval + conditions.stall + conditions.restart) / mean > _NEVER:
        return 0.0
    spent = mean * exp(conditions.restart / mean) * (exp((interval + conditions.stall) / mean) - 1)
    return interval / spent


def best_interval(conditions: Conditions) -> float:
    """The interval with the largest :func:`expected_useful`, by golden-section search around Young's."""
    low, high = young_daly(conditions) / 20, young_daly(conditions) * 20
    ratio = (sqrt(5) - 1) / 2
    for _ in range(80):
        one, two = high - ratio * (high - low), low + ratio * (high - low)
        if expected_useful(conditions, one) < expected_useful(conditions, two):
            low = one
        else:
            high = two
    return (low + high) / 2


def simulate_run(conditions: Conditions, interval: float, seconds: float, *, trials: int = 200, seed: int = 0) -> Yield:
    """``trials`` runs of ``seconds`` each, drawn from ``seed``; fewer where so many would take long.

    Raises :class:`InputError` for runs with more saves and failures than are simulated.
    """
    events = 1 + seconds / (interval + conditions.stall) + seconds / conditions.between_failures
    if events * _FEWEST > _EVENTS:
        raise InputError(
            f"{seconds / 86400:g} days have about {events:.0f} saves and failures",
            why=f"at most {_EVENTS // _FEWEST} are simulated",
            fix="simulate fewer --days, or save less often",
        )
    trials = min(trials, int(_EVENTS / events))
    drawn = Random(seed)
    runs = [_one_run(conditions, interval, seconds, drawn) for _ in range(trials)]
    kept = [run[0] / seconds / conditions.straggling for run in runs]
    saving, lost, restarting, failures = (fmean(run[index] for run in runs) for index in range(1, 5))
    marks = quantiles(kept, n=20) if trials > 1 else kept
    return Yield(
        interval=interval,
        useful=fmean(kept),
        low=marks[0],
        high=marks[-1],
        saving=saving / seconds,
        lost=lost / seconds,
        restarting=restarting / seconds,
        straggling=fmean(kept) * (conditions.straggling - 1),
        failures=failures,
    )


def _one_run(conditions: Conditions, interval: float, seconds: float, drawn: Random) -> tuple[float, ...]:
    """Seconds of kept work, saving, lost work and restarting, and the number of failures, of one run."""
    rate = 1 / conditions.between_failures
    now = kept = saving = lost = restarting = 0.0
    failures = 0
    next_failure = drawn.expovariate(rate)
    while now < seconds:
        end = now + interval + conditions.stall
        if end <= min(next_failure, seconds):
            now, kept, saving = end, kept + interval, saving + conditions.stall
            continue
        if next_failure >= seconds:  # the run ends; the last interval is saved by the end of the run
            done = min(interval, seconds - now)
            kept, saving = kept + done, saving + seconds - now - done
            break
        failures += 1
        lost += next_failure - now
        now = next_failure
        next_failure = now + drawn.expovariate(rate)
        while next_failure < min(seconds, now + conditions.restart):  # a failure while it restarts
            failures += 1
            restarting += next_failure - now
            now = next_failure
            next_failure = now + drawn.expovariate(rate)
        back = min(seconds, now + conditions.restart)
        restarting += back - now
        now = back
    return kept, saving, lost, restarting, failures
