"""A model as a folder of NumPy arrays, which any Python program can open."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megatron_run.contracts import Format, PluginInfo, Weights
from megatron_run.errors import CheckpointError
from megatron_run.hookspecs import hookimpl

MODEL = "model.json"
_DAMAGED = (OSError, ValueError, KeyError, TypeError, EOFError)


class Arrays(Format):
    files = f"{MODEL} and *.npy"

    def recognises(self, source: Path) -> bool:
        return (source / MODEL).is_file() and any(source.glob("*.npy"))

    def read(self, source: Path) -> Weights:
        try:
            about = json.loads((source / MODEL).read_text(encoding="utf-8"))
            tensors = {path.stem: partial(_read, path) for path in sorted(source.glob("*.npy"))}
            return Weights(about["model"], tensors, sequence_length=about["sequence_length"])
        except _DAMAGED as error:
            raise CheckpointError(f"{source} cannot be read", why=f"{type(error).__name__}: {error}") from error

    def write(self, weights: Weights, folder: Path) -> None:
        for name, read in weights.tensors.items():
            np.save(folder / f"{name}.npy", read().numpy())
        about = {"model": dict(weights.config), "sequence_length": weights.sequence_length}
        (folder / MODEL).write_text(json.dumps(about), encoding="utf-8")


def _read(path: Path) -> torch.Tensor:
    try:
        return torch.from_numpy(np.load(path))
    except _DAMAGED as error:
        raise CheckpointError(f"{path} cannot be read", why=f"{type(error).__name__}: {error}") from error


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("format", "arrays", provides=frozenset({"import", "export"}))


@hookimpl
def megatron_run_create_format() -> Format:
    return Arrays()
