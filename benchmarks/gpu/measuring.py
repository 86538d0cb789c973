"""Time on a device, sides in processes of their own, and what the device reaches at most: its ceilings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch

from benchmarks.support.ranks import on_ranks
from megatron_run_engine.training.peak import known_peak


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


def alone(measurement: Callable[..., Any], device: str, **arguments: object) -> dict[str, Any]:
    """What ``measurement(device=device, **arguments)`` finds in a process of its own, or ``{"failed": why}``."""
    environment = {"PYTHONWARNINGS": "ignore", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    threads = torch.get_num_threads() if device == "cpu" else 8
    try:
        found: dict[str, Any] = on_ranks(
            caught, 1, {"measured": f"{measurement.__module__}:{measurement.__name__}", "device": device, **arguments},
            threads=threads, environment=environment,
        )  # fmt: skip
    except SystemExit as failure:
        return {"failed": str(failure)}
    return found


def caught(measured: str, **arguments: Any) -> dict[str, Any]:
    """Call the function ``module:function`` of this process; an exception is a result, so that one row tells it."""
    module, _, function = measured.partition(":")
    try:
        found: dict[str, Any] = getattr(import_module(module), function)(**arguments)
    except Exception as failure:  # whatever a peer cannot do here
        return {"failed": f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure) else ''}"}
    return found


def ceilings(device: str, *, quick: bool) -> Mapping[str, Any]:
    """The piece: TFLOP/s of square products by type, bytes per second of a copy, and the data sheet's peak."""
    return alone(measure_ceilings, device, quick=quick)


def measure_ceilings(device: str, *, quick: bool) -> dict[str, Any]:
    """Medians, on random data: products of zeros draw less power, and run faster."""
    size, samples = (256, 3) if quick else (8192, 50)
    found: dict[str, Any] = {"device": device, "sheet": None, "name": device}
    if device == "cuda":
        found["name"] = torch.cuda.get_device_name()
        found["sheet"] = known_peak(found["name"], "bf16")
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
