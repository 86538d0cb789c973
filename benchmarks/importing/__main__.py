"""Memory and time of bringing a Hugging Face model in: importing it, and loading it on two ranks.

    python -m benchmarks.importing [--quick] > benchmarks/results/importing.md

A random Llama of 1.1 billion parameters, in bf16 and several files, is imported by the command. Then the imported
folder, and the Hugging Face folder itself, are loaded on two tensor-parallel ranks and on two stages, as `generate`
does, in fp32 and in bf16; and runs are built that start from the imported folder (`run.init_from`), without a step.

Memory is anonymous (`RssAnon`, sampled every two milliseconds), so that the mapped files, which the system can drop at
any time, do not count. What the process held before, its libraries, is taken off. A rank's share is its parameters, of
a run its masters and gradients too; the goal is a peak of at most 1.2 shares. Needs 9 GB of disk and 12 GB of memory.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.importing.llama import write_llama
from benchmarks.importing.memory import PeakAnonymous, load_part, start_part
from benchmarks.support.command import run
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table

#: Sizes of the model: 1.10 billion parameters, and with ``--quick`` 0.13 billion.
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32000}
SMALL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 32000}
#: What measures one rank's part: :func:`load_part` or :func:`start_part`.
Measure = Callable[..., Any]
#: The most that a rank may take, in shares.
GOAL = 1.2
SPLITS = {
    "2 tensor ranks": {"sets": ["parallel.tensor=2"], "plugins": ["parallel-layer=tensor"]},
    "2 stages": {"sets": ["parallel.pipeline=2"], "plugins": ["schedule=1f1b"]},
}
COLUMNS = ("folder", "onto", "precision", "share, MB", "peak, MB", "peak / share", "s", f"goal {GOAL}")


def import_folder(source: Path, folder: Path) -> tuple[int, float]:
    """Import ``source`` by the command: peak of its anonymous memory in bytes, libraries included, and seconds."""
    start = time.perf_counter()
    command = (sys.executable, "-m", "megatron_run_cli", "import", str(source), str(folder))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process, PeakAnonymous(process.pid) as memory:
        code = process.wait()
        seconds = time.perf_counter() - start
    if code:
        raise SystemExit(f"import ended with {code}")
    return memory.peak, seconds


def rows(ways: Mapping[str, tuple[Measure, Path]]) -> Iterator[tuple[object, ...]]:
    """A row for each way to load a folder, split and precision: that of the rank with the most shares."""
    for name, (measure, folder) in ways.items():
        for split, asked in SPLITS.items():
            for precision in ("fp32", "bf16"):
                sets = [*asked["sets"], f"train.precision={precision}"]
                arguments = {**asked, "path": str(folder), "sets": sets}
                found = on_ranks(measure, 2, arguments, keeping=True)
                worst = max(found, key=lambda each: each["peak"] / each["share"])
                ratio = worst["peak"] / worst["share"]
                sizes = (f"{worst[each] / 1e6:.0f}" for each in ("share", "peak"))
                seconds = max(each["seconds"] for each in found)
                verdict = "yes" if ratio <= GOAL else "no"
                yield name, split, precision, *sizes, f"{ratio:.2f}", f"{seconds:.1f}", verdict


def report(*, quick: bool) -> Iterator[str]:
    """Import, then load in each way."""
    with tempfile.TemporaryDirectory() as home:
        source, imported = Path(home) / "theirs", Path(home) / "ours"
        parameters = write_llama(source, SMALL if quick else LARGE)
        peak, seconds = import_folder(source, imported)
        files = len(list(source.glob("*.safetensors")))
        yield f"\nA Llama of {parameters / 1e9:.2f} billion parameters, bf16 in {files} files. One thread a rank.\n"
        yield f"`import`: {seconds:.1f} s, peak {peak / 1e6:.0f} MB of anonymous memory, libraries included, for"
        yield f"{4 * parameters / 1e6:.0f} MB of fp32 written.\n"
        loaded = {"imported": (load_part, imported), "Hugging Face's": (load_part, source)}
        yield from table(COLUMNS, rows({**loaded, "imported, by a run": (start_part, imported)}))


if __name__ == "__main__":
    run("importing", "Importing a model", __doc__ or "", report)
