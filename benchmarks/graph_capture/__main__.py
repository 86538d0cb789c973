"""The cost and memory of captured and compiled layers: a stage, eagerly, from tapes, and compiled.

    python -m benchmarks.graph_capture [--quick] [--only speed memory]

Sides take turns in one process and one thread; processor time, which other work on the machine lengthens little. First
each side's gradient is compared with the eager one's: bit for bit, and compiled within the rounding of fp32. Prints
benchmarks/results/graph_capture.md. Nothing is judged: a CPU launches its kernels cheaply, and what is saved here is
Python.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.graph_capture.stage import Size, Stage, one_f_one_b
from benchmarks.support.command import run
from benchmarks.support.report import table

SAMPLES, FEW = 15, 5
STEPS = 5
#: Hidden size -> how many times as fast as eager tapes should be.
GOALS = {64: 1.3, 128: 1.2, 256: 0.97}
IN_FLIGHT = 4


def speed(*, quick: bool) -> Iterator[str]:
    """Time by hidden size."""
    torch.set_num_threads(1)
    samples = FEW if quick else SAMPLES
    yield f"\nTwo layers, forward and backward, 64 tokens, fp32: median of {samples} samples of {STEPS} steps.\n"
    sides = ("tapes", "compile")
    times, factors = (f"{name}, ms" for name in sides), (f"{name}, x eager" for name in sides)
    rows = (speed_row(hidden, samples) for hidden in GOALS)
    yield from table(("hidden", "eager, ms", *times, *factors, "goal"), rows)


def memory(*, quick: bool) -> Iterator[str]:
    """The memory of graphs, by the number of microbatches: there is nothing to sample."""
    del quick
    yield f"\nOne stage with {IN_FLIGHT} microbatches in flight under 1F1B, two layers of hidden size 64:\n"
    columns = ("graphs for each", "microbatches", "graphs", "slots", "static inputs, KiB", "graph memory, KiB")
    cases = ((reuse, count) for reuse in ("per_microbatch", "per_slot") for count in (IN_FLIGHT, 4 * IN_FLIGHT))
    yield from table(columns, (memory_row(*case) for case in cases))


def speed_row(hidden: int, samples: int) -> tuple[object, ...]:
    """Milliseconds a step of each side, and how many times as fast as eager each other is."""
    actions = one_f_one_b(1, 1)
    sides = {name: Stage(Size(hidden)) for name in ("eager", "tapes", "compile")}
    for stage in sides.values():
        stage.x, stage.gradient = sides["eager"].x, sides["eager"].gradient
    sides["tapes"].capture(actions)
    sides["compile"].compile(actions)
    if not torch.equal(sides["tapes"].run(actions, 1), sides["eager"].run(actions, 1)):
        raise SystemExit(f"the gradient by tapes at hidden size {hidden} is not the eager one")
    if not torch.allclose(sides["compile"].run(actions, 1), sides["eager"].run(actions, 1), rtol=1e-4, atol=1e-5):
        raise SystemExit(f"the compiled gradient at hidden size {hidden} is not the eager one")
    times: dict[str, list[float]] = {name: [] for name in sides}
    for sample in range(samples):
        for name, stage in sides.items():
            times[name].append(timed(lambda stage=stage, sample=sample: several(stage, sample)))  # type: ignore[misc]
    medians = {name: statistics.median(found) for name, found in times.items()}
    ratios = (f"{medians['eager'] / medians[name]:.2f}" for name in medians if name != "eager")
    return hidden, *(f"{1e3 * seconds / STEPS:.2f}" for seconds in medians.values()), *ratios, f"{GOALS[hidden]:.2f}"


def several(stage: Stage, sample: int) -> None:
    """The steps of a sample."""
    for step in range(STEPS):
        stage.run(one_f_one_b(1, 1), 2 + sample * STEPS + step)


def timed(call: Callable[[], None]) -> float:
    """Processor seconds of ``call``."""
    start = time.process_time()
    call()
    return time.process_time() - start


def memory_row(reuse: str, microbatches: int) -> tuple[object, ...]:
    """The graphs and memory of a capture of so many microbatches."""
    size = Stage(Size(64)).capture(one_f_one_b(IN_FLIGHT, microbatches), reuse=reuse)
    held = (f"{(each or 0) / 1024:.0f}" for each in (size.static_bytes, size.pool_bytes))
    return reuse.replace("per_", ""), microbatches, size.graphs, size.slots, *held


if __name__ == "__main__":
    run("graph_capture", "Graph capture on a CPU", __doc__ or "", {"speed": speed, "memory": memory})
