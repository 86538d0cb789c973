"""How long does a user wait for `megatron-run plugins list`? It reads metadata and imports no plugin.

    python benchmarks/listing_plugins.py [RUNS]

Prints the wall time of whole processes, beside a Python that does nothing and one that imports torch.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import distributions

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


def main() -> None:
    """Measure each command ``RUNS`` times, in turns, and print a table."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs):
        for name, arguments in COMMANDS.items():
            times[name].append(seconds(arguments))
    installed = sum(1 for _ in distributions())
    print(
        f"{platform.machine()}, Python {platform.python_version()}, {installed} distributions installed, {runs} runs\n"
    )
    print("| process | least, ms | median, ms |\n|---|---|---|")
    for name, measured in times.items():
        print(f"| {name} | {min(measured) * 1e3:.0f} | {statistics.median(measured) * 1e3:.0f} |")


if __name__ == "__main__":
    main()
