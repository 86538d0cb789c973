"""torch's own: ``torch.distributed.checkpoint``, and ``torch.save`` of each rank's tensors into a file of its own."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint.state import State


class _Folders:
    """A folder for each number."""

    def __init__(self, state: State, folder: Path) -> None:
        self._state, self._folder = state, folder

    def drop(self, number: int) -> None:
        """Remove the folder."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder / str(number))
        dist.barrier()


class DistributedCheckpoint(_Folders):
    """A file a rank, synced, and metadata of all of them. Nothing is hashed."""

    def save(self, number: int) -> None:
        """As its documentation shows it."""
        from torch.distributed.checkpoint.state_dict_saver import save  # a second of imports

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(dict(self._state.tensors), checkpoint_id=self._folder / str(number))

    def load(self, number: int) -> None:
        """Into the tensors that are there."""
        from torch.distributed.checkpoint.state_dict_loader import load

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(dict(self._state.tensors), checkpoint_id=self._folder / str(number))


class TorchSave(_Folders):
    """``torch.save``, with a sync of the file at its end where ``synced``."""

    def __init__(self, state: State, folder: Path, *, synced: bool) -> None:
        super().__init__(state, folder)
        self._synced = synced

    def save(self, number: int) -> None:
        """Returns when all ranks have saved."""
        path = self._path(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            torch.save(dict(self._state.tensors), file)
            if self._synced:
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def load(self, number: int) -> None:
        """Only tensors are read: nothing is executed."""
        loaded: dict[str, Any] = torch.load(self._path(number), weights_only=True)
        for name, tensor in self._state.tensors.items():
            tensor.copy_(loaded[name])

    def _path(self, number: int) -> Path:
        return self._folder / str(number) / f"rank{dist.get_rank()}.pt"
