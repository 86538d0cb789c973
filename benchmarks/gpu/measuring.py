"""Time on a device, sides in processes of their own, and what the device reaches at most: its ceilings."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch

from benchmarks.support.ranks import results_of_ranks

#: Seconds that a side may take, and those without which none begins.
PATIENCE, LEAST = 150.0, 5.0
#: Calls of a graph, so many that starting it takes no noticeable part of its time.
_CALLS = 10


def seconds(call: Callable[[], object], device: str, samples: int, warm_up: int = 3) -> list[float]:
    """Seconds of each of ``samples`` calls, after ``warm_up`` that do not count.

    A GPU's clock is read by events on the stream, so that what the host does meanwhile counts only where the device
    waits for it.
    """
    for _ in range(warm_up):
        call()
    if device == "cpu":
        marks = [time.perf_counter()]
        for _ in range(samples):
            call()
            marks.append(time.perf_counter())
        return [after - before for before, after in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def device_seconds(call: Callable[[], object], device: str, samples: int) -> list[float]:
    """Seconds that the device takes for ``call``: without the host, as often as ``samples`` says.

    A replayed graph of several calls is what is timed: between them the device waits for nobody. On a CPU, whose host
    it is, it is :func:`seconds`.
    """
    if device == "cpu":
        return seconds(call, device, samples)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a first call makes, such as workspaces and compiled kernels, stays
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    return [taken / _CALLS for taken in seconds(graph.replay, device, samples)]


@dataclass(frozen=True)
class Day:
    """The machine's time: its device, whether sizes are tiny, until when (``time.monotonic``) sides begin."""

    device: str
    quick: bool = False
    until: float = math.inf
    sides: tuple[str, ...] = ()

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that were asked for: all of them where none was."""
        return [name for name in names if not self.sides or name in self.sides]


def alone(measurement: Callable[..., Any], day: Day, **arguments: object) -> dict[str, Any]:
    """The record of ``measurement(device=..., quick=..., **arguments)`` in its own process, or ``{"failed": why}``."""
    ((_, found),) = in_turn(measurement, day, {"": arguments})
    return found


def in_turn(
    measurement: Callable[..., Any], day: Day, cases: Mapping[str, Mapping[str, object]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case's name with what ``measurement`` finds, also printed, as soon as it is there, or ``{"failed": why}``.

    The cases share a process, whose start costs more than many of them: the next one gets another only after a case
    that ended it, took longer than ``PATIENCE``, or left the device unusable.
    """
    todo = dict(cases)

    def reported(found: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        name = next(iter(todo))
        del todo[name]
        print(f"  {name or measurement.__name__}: {shown(found)}", flush=True)
        return name, found

    while todo:
        left = day.until - time.monotonic()
        if left < LEAST:
            yield reported({"failed": "there was no time left"})
            continue
        try:
            for found in results_of_ranks(
                results, 1,
                {
                    "measured": f"{measurement.__module__}:{measurement.__name__}",
                    "cases": [{"device": day.device, "quick": day.quick, **case} for case in todo.values()],
                },
                threads=torch.get_num_threads() if day.device == "cpu" else 8,
                environment={"PYTHONWARNINGS": "ignore", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
                backend="gloo" if day.device == "cpu" else "cpu:gloo,cuda:nccl",
                patience=min(PATIENCE, left),
            ):  # fmt: skip
                yield reported(found)
        except SystemExit as failure:
            yield reported({"failed": str(failure)})


def shown(found: Mapping[str, Any]) -> str:
    """``found`` on one line, numbers with three digits or whole."""
    values = (
        (key, f"{value:.3g}" if isinstance(value, float) and value < 1e3 else value) for key, value in found.items()
    )
    return ", ".join(f"{key} {value:.0f}" if isinstance(value, float) else f"{key} {value}" for key, value in values)


def results(measured: str, cases: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The record of the function ``module:function`` in each case; ends early if the device is unusable.

    An exception is a result, so that one row tells it. Memory is given back between cases.
    """
    module, _, function = measured.partition(":")
    for case in cases:
        cuda = case["device"] == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            yield getattr(import_module(module), function)(**case)
        except Exception as failure:  # whatever a peer cannot do here
            lines = str(failure).strip().splitlines() or [""]
            yield {"failed": f"{type(failure).__name__}: {lines[0]}"}
            if "CUDA error" in str(failure):
                return
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def ceilings(day: Day) -> Iterator[Mapping[str, Any]]:
    """The piece: TFLOP/s of square products by type, and bytes per second of a copy."""
    yield alone(measure_ceilings, day)


def measure_ceilings(device: str, *, quick: bool) -> dict[str, Any]:
    """Medians, on random data: products of zeros draw less power, and run faster."""
    size, samples = (256, 3) if quick else (8192, 50)
    found: dict[str, Any] = {"device": device, "name": device}
    if device == "cuda":
        found["name"] = torch.cuda.get_device_name()
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        product = torch.empty_like(left)
        taken = statistics.median(seconds(lambda a=left, b=right, c=product: torch.mm(a, b, out=c), device, samples))  # type: ignore[misc]
        found[f"{name} TFLOP/s"] = 2 * size**3 / taken / 1e12
    source = torch.randn((2**22 if quick else 2**30) // 4, device=device)
    target = torch.empty_like(source)
    taken = statistics.median(seconds(lambda: target.copy_(source), device, samples))
    found["copy TB/s"] = 2 * source.nbytes / taken / 1e12  # read and written
    return found
