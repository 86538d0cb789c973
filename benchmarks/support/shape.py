"""The sizes that decide how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder and of a rank's step: ``microbatches`` of ``micro_batch`` sequences."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocab: int
    micro_batch: int
    microbatches: int

    def __str__(self) -> str:
        batches = "one microbatch" if self.microbatches == 1 else f"{self.microbatches} microbatches"
        sequences = "one sequence" if self.micro_batch == 1 else f"{self.micro_batch} sequences"
        return (
            f"{self.layers} layers, hidden {self.hidden}, {self.heads} heads, vocabulary {self.vocab}, "
            f"{batches} of {sequences} of {self.sequence}"
        )


#: What most benchmarks compute: large enough that matrix products decide, small enough for minutes on a laptop.
SMALL = Shape(layers=6, hidden=384, heads=6, sequence=256, vocab=8192, micro_batch=4, microbatches=4)
#: For tests of the benchmarks themselves.
TINY = Shape(layers=2, hidden=64, heads=2, sequence=8, vocab=256, micro_batch=2, microbatches=2)
