"""A window of steps under torch's profiler, the allocator's recorder, or NVIDIA's ranges."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from megatron_run.files.safe_folder import SafeFolder

#: Rows of the table: what a person reads before opening the trace.
ROWS = 40
#: Allocations that the recorder keeps.
ENTRIES = 1_000_000


class Recording:
    """Records from now until ``close``. ``memory`` and ``nvtx`` need a GPU."""

    def __init__(self, *, memory: bool, stacks: bool, nvtx: bool) -> None:
        gpu = torch.cuda.is_available()
        self._memory, self._ranges, self._profile = memory, None, None
        if memory:
            torch.cuda.memory._record_memory_history(max_entries=ENTRIES)  # the documented way, private by name only
        if nvtx:
            # For `nsys profile --capture-range=cudaProfilerApi`: a second profiler cannot run beside torch's own.
            torch.cuda.profiler.start()
            self._ranges = torch.autograd.profiler.emit_nvtx()
            self._ranges.__enter__()
        else:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu
            self._profile = torch.profiler.profile(activities=activities, record_shapes=True, with_stack=stacks)
            self._profile.start()

    def step_done(self) -> None:
        """Mark the end of a step in the profile."""
        if self._profile is not None:
            self._profile.step()

    def close(self, folder: Path, name: str) -> None:
        """Stop, and write ``name.json`` (a trace), ``name.txt`` (a table), ``name-memory.pickle``. Raises OSError."""
        if self._ranges is not None:
            self._ranges.__exit__(None, None, None)
            torch.cuda.profiler.stop()
        files, place = SafeFolder(folder.parent), folder.name
        files.make(place)
        with TemporaryDirectory(prefix="megatron-run-profile-") as scratch:  # torch writes to paths, over any link
            if self._profile is not None:
                self._profile.stop()
                self._profile.export_chrome_trace(f"{scratch}/{name}.json")
                Path(scratch, f"{name}.txt").write_text(_table(self._profile), encoding="utf-8")
            if self._memory:
                torch.cuda.memory._dump_snapshot(f"{scratch}/{name}-memory.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)
            for written in sorted(Path(scratch).iterdir()):
                with written.open("rb") as source, files.create(f"{place}/{written.name}") as target:
                    shutil.copyfileobj(source, target)


def _table(profile: Any) -> str:
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return str(profile.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=80))
