"""How long is a run down when a rank dies, and how much of its time is it up? Measured here, and simulated beyond.

    python -m benchmarks.restart [--quick] [--only phases hangs effective simulation] [--minutes 60]

A model of 50 M parameters on 8 CPU ranks, whose ranks are killed at random (SIGKILL). ``phases``: from the kill to the
first new step, out of memory and from the disk; ``hangs``: the same after a rank that hangs or is stopped (SIGSTOP).
``effective``: the share of the wall time that ended in steps which stayed, out of memory, with a death each minute.
``simulation``: up to 16,384 ranks with a failure every 3 hours; what it rests on stands beside it.
"""

from __future__ import annotations

from benchmarks.restart.effective import effective
from benchmarks.restart.hangs import hangs
from benchmarks.restart.phases import phases
from benchmarks.restart.simulation import simulation
from benchmarks.support.command import Number, run

if __name__ == "__main__":
    run(
        "restart",
        "Restarts",
        __doc__ or "",
        {"phases": phases, "hangs": hangs, "effective": effective, "simulation": simulation},
        number=Number("minutes", "effective", "effective time: 60, or 2 with --quick"),
    )
