"""Times operators and short trainings on one CUDA device, by its own events: medians, on random data."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_run.config.request import Request
from megatron_run.errors import InputError
from megatron_run_engine.estimate.calibration.timed_run import time_run
from megatron_run_engine.runtime.world import World
from megatron_run_engine.training.peak import known_peak

#: Seconds that the calls of one round take together, about, and rounds. The first calls choose kernels.
ROUND, ROUNDS, WARM_UP = 0.01, 5, 3
#: Kernels in the graph that tells how long a short one takes.
_SHORT = 200


class GpuClock:
    """Measures the first CUDA device. Raises :class:`InputError` where torch sees none."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise InputError("plan calibrate --device cuda needs a GPU", why="torch sees none", fix="--device cpu")
        self._device = torch.device("cuda:0")
        torch.cuda.set_device(self._device)
        self.name = torch.cuda.get_device_name(self._device)
        self.memory = float(torch.cuda.get_device_properties(self._device).total_memory)
        self.peak = 1e12 * (known_peak(self.name, "bf16") or 0.0)

    def product(self, rows: int, columns: int, depth: int) -> float:
        """Seconds of (rows x depth) @ (depth x columns) in bf16."""
        left = self._random(rows, depth)
        right = self._random(columns, depth).t()  # as a linear layer's weight lies
        result = torch.empty(rows, columns, dtype=torch.bfloat16, device=self._device)
        return self._seconds(lambda: torch.mm(left, right, out=result))

    def sweep(self, size: int) -> float:
        """Seconds in which an elementwise kernel reads and writes ``size`` bytes in all."""
        value = self._random(size // 4)
        result = torch.empty_like(value)
        return self._seconds(lambda: torch.mul(value, 2.0, out=result))

    def attention(self, micro_batch: int, heads: int, sequence: int, head_size: int) -> tuple[float, float]:
        """Seconds of causal attention in bf16, forward and backward."""
        shape = micro_batch, heads, sequence, head_size
        q, k, v = (self._random(*shape).requires_grad_() for _ in range(3))
        grad = self._random(*shape)

        def both() -> None:
            torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

        with torch.no_grad():
            forward = self._seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
        return forward, self._seconds(both) - forward

    def kernel(self) -> float:
        """Seconds of a kernel that does next to nothing, behind another one: launched by a graph, not by the host."""
        value, graph = torch.zeros(1, device=self._device), torch.cuda.CUDAGraph()
        value.add_(1.0)
        with torch.cuda.graph(graph):
            for _ in range(_SHORT):
                value.add_(1.0)
        return self._seconds(graph.replay) / _SHORT

    def training(self, request: Request, steps: int, first: int) -> float:
        """Seconds of a step of ``request``, the median of ``steps`` behind the ``first`` ones."""
        world = World(device=str(self._device), backend="nccl")
        with tempfile.TemporaryDirectory() as folder:
            wall = time_run(request, world, Path(folder), first + steps).wall
        gc.collect()  # a training is full of cycles
        torch.cuda.empty_cache()
        return median(wall[first:])

    def _random(self, *shape: int) -> torch.Tensor:
        """Values that cost a product as much power as those of a training; zeros would be faster."""
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device)

    def _seconds(self, call: Callable[[], object]) -> float:
        """Seconds of ``call`` on the device: the median of rounds of several calls each."""
        for _ in range(WARM_UP):
            call()
        count = max(1, round(ROUND / max(self._spent(call, 1), 1e-6)))
        return median(self._spent(call, count) for _ in range(ROUNDS)) / count

    def _spent(self, call: Callable[[], object], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return 1e-3 * float(start.elapsed_time(end))
