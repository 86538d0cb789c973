"""This project's saving and loading, as a run does both: every byte hashed, and nothing committed by halves."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.checkpoint.state import State
from megatron_run_engine.checkpoint.collectives import WorldRanks, on_all_ranks
from megatron_run_engine.checkpoint.manifest import About, DataRecord
from megatron_run_engine.checkpoint.reader import Reader
from megatron_run_engine.checkpoint.saving import Saver
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.runtime.comm import Groups
from megatron_run_engine.training.state.resuming import files_at_once, verify_share

_NOTHING = "0" * 64


class OurSide:
    """Steps under ``folder``."""

    def __init__(self, state: State, folder: Path) -> None:
        self._state = state
        self._checkpoints = Checkpoints(folder)
        world = Groups(world=dist.group.WORLD)
        self._ranks = WorldRanks(world, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
        threads = files_at_once()
        self._saver = Saver(self._checkpoints, self._ranks, "benchmark", files_of_rank=threads, at_once=threads)

    def save(self, number: int) -> None:
        """Shards, manifest, names, and ``latest``."""
        about = About(
            step=number,
            run="benchmark",
            time="",
            counters={},
            scaler={},
            data=DataRecord(samples=0, sha256=_NOTHING),
            plugins={},
            versions={},
            topology={},
            config=_NOTHING,
            identity={},
        )
        self._saver.save(about, self._state.pieces, self._state.shapes)

    def load(self, number: int) -> None:
        """Each rank verifies its part of the files; then each box is read."""
        manifest = on_all_ranks(self._ranks, lambda: verify_share(self._checkpoints, number, self._ranks))
        reader = Reader(self._checkpoints.folder(number), manifest)
        for piece in self._state.pieces:
            piece.tensor.copy_(reader.read(*piece[:4]))

    def drop(self, number: int) -> None:
        """Remove the step."""
        dist.barrier()
        if self._ranks.rank == 0:
            shutil.rmtree(self._checkpoints.folder(number))
            (self._checkpoints.path / "latest").unlink(missing_ok=True)
        dist.barrier()
