"""Does what is learned depend on how it is computed? Random valid configurations of everything that is installed.

    make compose                 (or python -m tests.compose --count 200 --seed 7)

``megatron_run_testing.conformance.composition`` says what is drawn and compared. `megatron-run plugins check --compose`
does the same around one package. Exits with 1 when something differs.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser

from megatron_run_testing.conformance.composition.campaign import search
from megatron_run_testing.conformance.composition.space import Space


def main(count: int, seed: int) -> int:
    """Compare ``count`` compositions; print the largest differences, and what to type for each that is wrong."""
    found = search(Space.of_installed(), count, seed, lambda line: print(line, file=sys.stderr, flush=True))
    print(found)
    for difference in found.differences:
        print(f"{difference.composition}: {'; '.join(difference.faults)}", *difference.commands, sep="\n    ")
    return 0 if found.passed else 1


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="compositions to compare")
    parser.add_argument("--seed", type=int, default=1, help="of the choices")
    asked = parser.parse_args()
    sys.exit(main(asked.count, asked.seed))
