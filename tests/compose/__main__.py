"""Does what is learned depend on how it is computed? Random valid configurations against the single process.

    make compose                 (or python -m tests.compose --count 200 --seed 7)

A composition draws what is learned (model, batch, decay, clipping, rule) and how it is carried out (ranks, schedule,
layers, ZeRO-1, recomputation, capture, a resume on other ranks). Losses, gradient norms, evaluations and all final
weights are compared in fp32, tightly enough that a weight decay of 0.051 for 0.05 is seen. What differs is made simpler
until nothing more can be left out. Exits with 1 when something differs.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from random import Random

from tests.compose.compare import compare, faults
from tests.compose.draw import Composition


def main(count: int, seed: int) -> int:
    """Compare ``count`` compositions; print one line for each that is wrong, and the largest differences."""
    random, wrong, seen = Random(seed), list[Composition](), list[tuple[float, ...]]()
    refused = 0
    while len(seen) + len(wrong) < count:
        drawn = [Composition.drawn(random) for _ in range(min(20, count - len(seen) - len(wrong)))]
        for composition, found in zip(drawn, compare(drawn), strict=True):
            if found is None:
                refused += 1
            elif faults(found):
                wrong.append(composition)
                print(f"WRONG: {composition}: {'; '.join(faults(found))}", flush=True)
            else:
                seen.append(found.largest)
        print(f"{len(seen)} equal, {len(wrong)} wrong, {refused} refused", file=sys.stderr, flush=True)
    names = ("loss", "gradient norm", "evaluation", "weight")
    largest = [max(values) for values in zip(*seen, strict=True)] if seen else []
    print(f"{len(seen)} of {count} compositions equal, {refused} refused; largest differences: ", end="")
    print(", ".join(f"{name} {value:.1e}" for name, value in zip(names, largest, strict=False)))
    for composition in wrong:
        print(f"simplest: {simplest(composition)}")
    return 1 if wrong else 0


def simplest(composition: Composition) -> Composition:
    """The composition with as many axes at their simplest as still differs."""
    for simpler in composition.simpler():
        (found,) = compare([simpler])
        if found is not None and faults(found):
            return simplest(simpler)
    return composition


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="compositions to compare")
    parser.add_argument("--seed", type=int, default=1, help="of the choices")
    asked = parser.parse_args()
    sys.exit(main(asked.count, asked.seed))
