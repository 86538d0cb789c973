"""The cost of the guards of a step, in processor time, which other work on the machine does not lengthen as much.

    python -m benchmarks.guards [--quick]

Comparing replicas is hashing every weight, so it is set beside the update of as many, which every step makes. The rest
is what a step on which nothing is wrong pays: one look at the losses' window, and one mark at each change of phase.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.support.command import run
from benchmarks.support.report import table
from megatron_run.contracts.activity import Activity
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.runtime.comm import Groups
from megatron_run_engine.training.health.guards import spike_limit
from megatron_run_engine.training.health.replicas import bit_sum, content_hash
from megatron_run_engine.training.health.stragglers import Stragglers
from megatron_run_testing.build_contexts import context_at

#: Values of the matrix that is hashed and updated.
VALUES = 2**24
#: Phases that are entered for one time of one.
ENTERED = 10_000
RUNS, FEW = 15, 3


def measured(work: Callable[[], object], runs: int) -> float:
    """The median processor time of ``work`` in seconds, after one run that counts for nothing."""
    times = []
    for _ in range(runs + 1):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times[1:])


def enter_phases(*, timed: bool) -> Callable[[], None]:
    """Enter ``ENTERED`` phases, which a clock of the guards hears if they are ``timed``."""
    activity = Activity()
    activity.step(1)
    stragglers = Stragglers(context_at(Topology(Sizes(data=2), 0), Groups(), dtype=torch.float32), 1, 2.0)
    if timed:
        activity.listeners.append(stragglers.enter)

    def work() -> None:
        for _ in range(ENTERED):
            activity.enter("forward", 0)

    return work


def report(*, quick: bool) -> Iterator[str]:
    """The time of each guard."""
    runs = FEW if quick else RUNS
    torch.set_num_threads(1)
    weights = torch.nn.Parameter(torch.randn(VALUES))
    weights.grad = torch.randn(VALUES)
    half = weights.detach().bfloat16()
    update = torch.optim.AdamW([weights], fused=True)
    losses = torch.rand(128).tolist()
    rows = {
        f"hash of {VALUES:,} fp32 weights, ms": measured(lambda: content_hash(weights), runs) * 1e3,
        "the same in bf16, ms": measured(lambda: content_hash(half), runs) * 1e3,
        "the sum of the bits of fp32 weights, ms": measured(lambda: bit_sum([weights], weights.device), runs) * 1e3,
        f"update of {VALUES:,} weights (fused AdamW), ms": measured(update.step, runs) * 1e3,
        "the limit of a spike over 128 losses, us": measured(lambda: spike_limit(losses, 10.0), runs) * 1e6,
        "a change of phase, us": measured(enter_phases(timed=False), runs) / ENTERED * 1e6,
        "a change of phase that is timed, us": measured(enter_phases(timed=True), runs) / ENTERED * 1e6,
    }
    yield f"\nOne thread, {runs} runs.\n"
    yield from table(
        ("", "processor time, median"), ((name, f"{float(f'{value:.2g}'):g}") for name, value in rows.items())
    )


if __name__ == "__main__":
    run("guards", "What guards cost", __doc__ or "", report)
