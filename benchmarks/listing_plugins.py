"""How long does a user wait for `megatron-run plugins list`? It reads metadata and imports no plugin.

    python -m benchmarks.listing_plugins [--quick]

Prints the wall time of whole processes, beside a Python that does nothing and one that imports torch.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import distributions

from benchmarks.support.command import run
from benchmarks.support.report import table

RUNS, FEW = 7, 3
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import megatron_run": ["-c", "import megatron_run"],
    "megatron-run plugins list": ["-m", "megatron_run_cli", "plugins", "list"],
    "import torch": ["-c", "import torch"],
}


def seconds(arguments: list[str]) -> float:
    """Wall time of one process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def report(*, quick: bool) -> Iterator[str]:
    """How long each command takes, in turns with the others."""
    runs = FEW if quick else RUNS
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs):
        for name, arguments in COMMANDS.items():
            times[name].append(seconds(arguments))
    yield f"\n{sum(1 for _ in distributions())} distributions installed, {runs} runs.\n"
    rows = ((name, f"{min(each) * 1e3:.0f}", f"{statistics.median(each) * 1e3:.0f}") for name, each in times.items())
    yield from table(("process", "least, ms", "median, ms"), rows)


if __name__ == "__main__":
    run("listing_plugins", "Listing plugins", __doc__ or "", report)
