"""Peak anonymous memory of a process, and of the ranks that load a model."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from megatron_run.config.request import Request
from megatron_run.planning import resolve
from megatron_run_engine.checkpoint.collectives import WorldRanks
from megatron_run_engine.runtime.parameter_init import shapes_of
from megatron_run_engine.runtime.world import World
from megatron_run_engine.training.build import build
from megatron_run_engine.training.state.init_from import start_from
from megatron_run_inference.loaded_model import LoadedModel
from megatron_run_inference.network import plan
from megatron_run_inference.source import find_source

#: A run on mock data that never steps.
RUN = ("run.device=cpu", "data.use=mock", "data.vocab_size=32000", "train.steps=1", "train.micro_batch_size=1")
#: Seconds between two samples.
PERIOD = 0.002


class PeakAnonymous:
    """The most anonymous memory that the process ``pid`` holds within the block, in bytes, and before it."""

    def __init__(self, pid: int | str = "self") -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.before = self.peak = self._now()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _now(self) -> int:
        """0 once the process has ended."""
        found = re.search(r"RssAnon:\s*(\d+) kB", self._status.read_text("utf-8"))
        return int(found[1]) * 1024 if found else 0

    def _sample(self) -> None:
        while not self._done.wait(PERIOD):
            self.peak = max(self.peak, self._now())


def start_part(path: str, sets: list[str], plugins: list[str]) -> list[dict[str, Any]]:
    """Build this rank's part of a run and start it from the weights at ``path``; what each rank found, on every rank.

    Its share is what the run holds before its first step: parameters, masters of 16-bit ones, and fp32 gradients.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    configs = ("preset:tiny", f"{path}/config.yaml")
    planned = resolve(Request(configs=configs, sets=(*RUN, *sets), plugins=tuple(plugins), nproc=size))
    dist.barrier()
    start = time.perf_counter()
    with PeakAnonymous() as memory:
        assembly = build(planned, World(rank, size, rank, size))
        ranks = WorldRanks(assembly.context.groups, rank, size, assembly.context.device)
        start_from(planned, assembly, Path(path), ranks, shapes_of(assembly.infos))
        seconds = time.perf_counter() - start
    weights = {each for described in assembly.infos for each in described}
    share = sum(each.nbytes + 4 * each.numel() * (2 if each.itemsize < 4 else 1) for each in weights)
    return _everybody({"share": share, "peak": memory.peak - memory.before, "seconds": seconds})


def load_part(path: str, sets: list[str], plugins: list[str]) -> list[dict[str, Any]]:
    """Load this rank's part of the model at ``path``; what each rank found, on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    source = find_source(Path(path), verified=True)  # as a rank of generate: the launcher has verified the files
    planned = plan(source, Request(sets=("run.device=cpu", *sets), plugins=tuple(plugins), nproc=size))
    dist.barrier()
    start = time.perf_counter()
    with PeakAnonymous() as memory:
        model = LoadedModel(planned, source, World(rank, size, rank, size))
        seconds = time.perf_counter() - start
    parameters = {each for chunk in model.network.chunks for _, m in chunk.named_modules() for each in m.parameters()}
    share = sum(each.nbytes for each in parameters)
    return _everybody({"share": share, "peak": memory.peak - memory.before, "seconds": seconds})


def _everybody(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The findings of each rank, ``found``, in their order."""
    everybody: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    return everybody
