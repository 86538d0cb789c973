"""Peak resident memory of each side, in a process of its own, under the same settings of the allocator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from benchmarks.pipeline.memory import peak_bytes
from benchmarks.single.model import PRECISIONS, SHAPES, Precision
from benchmarks.single.sides import NANOGPT, TRAINER, make_side, names
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table

THREADS, STEPS, GOAL = 2, 3, 1.05


def measure_memory(shape: str, name: str, precision: Precision, steps: int) -> int:
    """Peak resident bytes of ``steps`` steps of side ``name``, on random tokens where it does not load its own."""
    sizes = SHAPES[shape]
    side, generator = make_side(name, sizes, precision), torch.Generator().manual_seed(1)
    size = (sizes.microbatches, 2, sizes.micro_batch, sizes.sequence)
    for _ in range(steps):
        pairs = torch.randint(sizes.vocab, size, generator=generator)
        side.step([(tokens, labels) for tokens, labels in pairs])
    side.close()
    return peak_bytes()


def report(*, quick: bool) -> Iterator[str]:
    """Measure every side, quickly only the two of the goal, and tell what was found."""
    yield "\n## Peak memory\n"
    yield f"Resident, with interpreter and libraries. Goal: at most {GOAL:.2f} of nanoGPT's.\n"
    columns = ("side", *(f"{precision}, {what}" for precision in PRECISIONS for what in ("MB", "of nanoGPT's")))
    compared = (TRAINER, NANOGPT) if quick else names()
    peaks = {name: {precision: _peak(name, precision) for precision in PRECISIONS} for name in compared}
    yield from table(columns, (tuple(_row(name, peaks)) for name in compared))


def _peak(name: str, precision: Precision) -> int:
    job = {"shape": "small", "name": name, "precision": precision, "steps": STEPS}
    peak: int = on_ranks(measure_memory, 1, job, threads=THREADS, keeping=True)
    return peak


def _row(name: str, peaks: Mapping[str, Mapping[Precision, int]]) -> Iterator[str]:
    yield name
    for precision, peak in peaks[name].items():
        yield f"{peak / 1e6:.0f}"
        yield f"{peak / peaks[NANOGPT][precision]:.2f}"
