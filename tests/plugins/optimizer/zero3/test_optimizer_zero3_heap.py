"""The heap of a rank whose parameters are lent: no gaps that grow with the model, nothing that grows with the steps.

glibc's settings are a process's own from its start, so that these runs are commands.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.commands import COMMAND, run_command

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator, and /proc, are Linux's"),
]

OBSERVER = """
import ctypes, json
from pathlib import Path

from megatron_run.contracts import Observer, PluginInfo
from megatron_run.hookspecs import hookimpl

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]

class Watch(Observer):
    def on_train_start(self, run):
        self.file, self.run = run.folder / "heap.jsonl", run
        self.library = ctypes.CDLL(None)
        self.library.mallinfo2.restype = Heap

    def on_step_end(self, metrics):
        if metrics.step > 2 and metrics.step % 100:
            return
        heap = self.library.mallinfo2()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        with self.file.open("a") as file:
            print(json.dumps((metrics.step, heap.fordblks, heap.uordblks, heap.hblkhd, pages)), file=file)

@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("observer", "heap")

@hookimpl
def megatron_run_create_observer():
    return Watch()
"""


class Heap(NamedTuple):
    """Bytes of rank 0's heap after a step: free, used and mapped by itself; and its resident pages."""

    step: int
    free: int
    used: int
    mapped: int
    pages: int


def heaps(folder: Path, **sets: object) -> list[Heap]:
    """The heap of rank 0 of two after the first two steps, and after each hundredth."""
    (folder / "observer.py").write_text(OBSERVER)
    run = folder / "run"
    values = {
        "parallel.data": 2,
        "train.micro_batch_size": 1,
        "train.global_batch_size": 2,
        "train.sequence_length": 16,
        "data.vocab_size": 256,
        "eval.interval": 0,
        "eval.batches": 1,
        "checkpoint.interval": 0,
        "run.folder": run,
        "run.threads": 1,
        **sets,
    }
    plugins = ("--plugin", "optimizer=zero3", "--plugin", "observer=./observer.py")
    settings = (words for key, value in values.items() for words in ("--set", f"{key}={value}"))
    seen = run_command((*COMMAND, "preset:tiny", *plugins, "--quiet", *settings), folder, timeout=600)
    assert seen.returncode == 0, seen.stderr
    return [Heap(*json.loads(line)) for line in (run / "heap.jsonl").read_text().splitlines()]


def test_parameters_that_are_built_whole_and_taken_away_leave_no_gaps(tmp_path: Path) -> None:
    layers, hidden = 8, 384
    model = {"model.num_layers": layers, "model.hidden_size": hidden, "model.num_heads": 6}
    _, second = heaps(tmp_path, **model, **{"train.steps": 2})
    weights = 4 * 12 * layers * hidden**2  # fp32
    assert second.used > weights / 2  # of two ranks
    assert second.free < weights / 2


@pytest.mark.nightly
def test_a_thousand_steps_grow_nothing(tmp_path: Path) -> None:
    rows = {row.step: row for row in heaps(tmp_path, **{"train.steps": 1000})}
    early, last = rows[500], rows[1000]  # what is kept of the last steps is full by the 500th
    assert last.used + last.mapped == pytest.approx(early.used + early.mapped, rel=0.01)
    assert last.pages == pytest.approx(early.pages, rel=0.01)
