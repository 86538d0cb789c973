"""Compares pipelines with torch.distributed.pipelining, and with their own plans.

    python benchmarks/pipeline.py [--quick] [--only pairs memory overhead sleep]

Prints the tables of ``results/pipeline.md``:

- pairs: step time of two gloo ranks with one thread each, the same chunks on both sides, in one process group and in
  turns (ours, theirs, ours, ...), after two warm-up steps; the gradients are compared before anything is timed. The
  optimizer is left out on both sides, and torch does not return outputs, which is its faster setting;
- memory: peak resident memory of the last rank, in fresh processes;
- overhead: microseconds that the executor adds to an action;
- sleep: four stages whose chunks sleep instead of compute, against the planned time.

With megatron-core on the path (``pip install --no-deps --target FOLDER megatron-core`` and ``PYTHONPATH=FOLDER``) its
1F1B is one more pair. A sample during which something else used more than a twentieth of the cores is dropped.
``--quick`` takes fewer samples.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Steps ran 1.1 to 1.3 times faster when glibc keeps what is freed; both sides of a pair get the same.
KEEPING = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=34359738368"
#: The share of the cores that something else may use during a sample.
FOREIGN = 0.05
#: With fewer undisturbed samples than this the least disturbed half is used, and the table says so.
ENOUGH = 3
PARTS = ("pairs", "memory", "overhead", "sleep")


def measure(what: str, world: int, arguments: Mapping[str, object], *, tuned: bool = False) -> Any:
    """What rank 0 of ``world`` fresh processes found."""
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "result.json"
        described = {"what": what, "store": str(Path(folder) / "store"), "result": str(result), "arguments": arguments}
        job.write_text(json.dumps(described), "utf-8")
        environment = {**os.environ, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
        environment |= {"GLIBC_TUNABLES": KEEPING} if tuned else {}
        command = (sys.executable, "-m", "benchmarks.pipeline_rank", str(job))
        ranks = [subprocess.Popen(command, cwd=ROOT, env={**environment, "RANK": str(rank)}) for rank in range(world)]
        try:
            codes = [rank.wait() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"{what}: the ranks ended with {codes}")
        return json.loads(result.read_text("utf-8"))


def undisturbed(samples: Sequence[Mapping[str, float]]) -> tuple[list[Mapping[str, float]], bool]:
    """The samples during which the machine was ours, and whether there are enough of them to be taken at their word.

    Where there are not, the least disturbed half stands in.
    """

    def disturbance(sample: Mapping[str, float]) -> float:
        return max(value for key, value in sample.items() if key.endswith("foreign"))

    quiet = [sample for sample in samples if disturbance(sample) <= FOREIGN]
    if len(quiet) >= ENOUGH:
        return quiet, True
    return sorted(samples, key=disturbance)[: max(1, len(samples) // 2)], False


def pair_rows(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row a pair: medians of both sides, and the median of the ratios of neighbouring samples."""
    yield "| ours | theirs | ours, s | theirs, s | ratio | ratio, processor time | gradients apart | pairs used |"
    yield "|---|---|---|---|---|---|---|---|"
    for pair in found:
        samples, quiet = undisturbed(pair["samples"])
        ours, theirs = (statistics.median(s[f"{side}_seconds"] for s in samples) for side in ("ours", "theirs"))
        ratio, work = (
            statistics.median(s[f"ours_{what}"] / s[f"theirs_{what}"] for s in samples)
            for what in ("seconds", "processor")
        )
        used = _used(samples, pair["samples"], quiet)
        apart = f"{pair['apart']:.0e}" if pair["apart"] else "equal"
        numbers = f"{ours:.3f} | {theirs:.3f} | {ratio:.3f} | {work:.3f}"
        yield f"| {pair['ours']} | {pair['theirs']} | {numbers} | {apart} | {used} |"


def memory_rows(steps: int) -> Iterator[str]:
    """A row a pair: peak of the last rank, with and without the outputs that torch returns by default."""
    yield "| ours | theirs | ours, MB | theirs, MB | ratio | theirs without outputs, MB | ratio |"
    yield "|---|---|---|---|---|---|---|"
    for ours, theirs, split in MEMORY:
        peaks = []
        for side, schedule in (("ours", ours), ("theirs, keeping outputs", theirs), ("theirs", theirs)):
            arguments = {"shape": "small", "side": side, "schedule": schedule, "split": split, "steps": steps}
            peaks.append(measure("memory", 2, arguments)["peak"] / 1e6)
        mine, keeping, without = peaks
        ratios = f"{keeping:.0f} | {mine / keeping:.2f} | {without:.0f} | {mine / without:.2f}"
        yield f"| {ours} | {theirs} | {mine:.0f} | {ratios} |"


MEMORY = (
    ("gpipe", "ScheduleGPipe", "gpipe"),
    ("1f1b", "Schedule1F1B", "1f1b"),
    ("interleaved", "ScheduleInterleaved1F1B", "interleaved"),
    ("zb-v", "ScheduleZBVZeroBubble", "zb-v"),
)


def overhead_rows(found: Mapping[str, float]) -> Iterator[str]:
    """Microseconds an action, with what a bare loop takes beside it."""
    yield "| | executor, us an action | bare loop, us | difference, us |"
    yield "|---|---|---|---|"
    for name, ours, bare in (
        ("one stage, 4 chunks, no messages", "alone", "bare"),
        ("two stages, 1f1b, a message an action", "with_messages", "bare_exchange"),
    ):
        yield f"| {name} | {found[ours]:.0f} | {found[bare]:.0f} | {found[ours] - found[bare]:.0f} |"


def sleep_rows(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row a schedule: planned and measured step, and how much longer than without a bubble each is."""
    yield "| schedule | planned, s | measured, s | ratio | planned over ideal | measured over ideal | samples used |"
    yield "|---|---|---|---|---|---|---|"
    for row in found:
        samples, quiet = undisturbed(row["samples"])
        planned, ideal = row["planned"], row["ideal"]
        measured = statistics.median(sample["seconds"] for sample in samples)
        times = f"{planned:.3f} | {measured:.3f} | {measured / planned:.3f}"
        over = f"{planned / ideal - 1:.4f} | {measured / ideal - 1:.4f}"
        yield f"| {row['schedule']} | {times} | {over} | {_used(samples, row['samples'], quiet)} |"


def _used(samples: Sequence[object], taken: Sequence[object], quiet: bool) -> str:
    return f"{len(samples)} of {len(taken)}" + ("" if quiet else ", disturbed")


def tables(parts: Sequence[str], *, quick: bool) -> Iterator[str]:
    """Every table asked for, as lines of markdown."""
    if "pairs" in parts:
        yield "\n## Step time, P 2, M 8\n"
        yield from pair_rows(measure("pairs", 2, {"shape": "small", "samples": 3 if quick else 11}, tuned=True))
    if "memory" in parts:
        yield "\n## Peak memory of the last rank\n"
        yield from memory_rows(2 if quick else 3)
    if "overhead" in parts:
        yield "\n## The executor's own time\n"
        yield from overhead_rows(measure("overhead", 2, {"microbatches": 500, "samples": 5 if quick else 15}))
    if "sleep" in parts:
        unit, samples = 0.04, 4 if quick else 10
        yield f"\n## Sleeping {unit * 1000:.0f} ms a unit, P 4, M 8\n"
        yield from sleep_rows(measure("sleep", 4, {"unit": unit, "samples": samples}))


def heading(arguments: Sequence[str]) -> tuple[str, ...]:
    """The title of the results, the command, and what ran it."""
    commit = subprocess.run(
        ("git", "describe", "--always", "--dirty"), cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"))
    machine = f"{os.cpu_count()} cores of {processor[1] if processor else platform.machine()}, {platform.system()}"
    return (
        "# Pipelines\n",
        f"    python benchmarks/pipeline.py {' '.join(arguments)}".rstrip() + "\n",
        f"{machine}, torch {version('torch')}, commit {commit}, {datetime.now(UTC):%Y-%m-%d}.",
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    given = parser.parse_args()
    print(*heading(sys.argv[1:]), sep="\n", flush=True)
    for line in tables(given.only, quick=given.quick):
        print(line, flush=True)


if __name__ == "__main__":
    main()
