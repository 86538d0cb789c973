"""Folders of ``torch.distributed.checkpoint``, with masters and moments.

This is the one place that touches that package: its ``.metadata`` is a pickle, which torch writes and reads, and
reading a pickle executes what it says. So reading is behind ``--trust-pickle``. What the model is stands beside
it, in JSON.

The state is nested as torch's users nest theirs: ``{"model": {name: weights}, "optimizer": {field: {name: moment}}}``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.files import FileSystem, reading
from megatron_run_engine.formats.weights import Read, Weights

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata

#: Our own words on the model, which torch does not look at.
SIDECAR = "megatron-run.json"
_METADATA, _MODEL, _OPTIMIZER = ".metadata", "model", "optimizer"


def recognises(source: Path) -> bool:
    """Whether ``source`` is such a folder that says which model it holds."""
    return (source / _METADATA).is_file() and (source / SIDECAR).is_file()


def write(weights: Weights, folder: Path) -> None:
    """Write masters and moments into ``folder``, then what the model is."""
    state: dict[str, Any] = {_MODEL: _read_all(weights.tensors)}
    if weights.moments:
        state[_OPTIMIZER] = {field: _read_all(readers) for field, readers in weights.moments.items()}
    with _alone():
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    said = {"step": weights.step, "sequence_length": weights.sequence_length, "model": dict(weights.config)}
    files = FileSystem()
    with files.create(folder / SIDECAR) as file:
        file.write(json.dumps(said, indent=2).encode())
        file.sync()
    files.sync_folder(folder)


def read(source: Path) -> Weights:
    """What :func:`write` wrote. Executes what ``.metadata`` says. Raises :class:`CheckpointError`."""
    said = _sidecar(source / SIDECAR)
    reader = _Reader(source)
    found: dict[str, dict[str, Read]] = {}
    for name, record in reader.metadata.state_dict_metadata.items():
        kind, _, rest = name.partition(".")
        field, _, tensor = rest.partition(".") if kind == _OPTIMIZER else ("", "", rest)
        if kind not in (_MODEL, _OPTIMIZER) or not hasattr(record, "size"):
            raise CheckpointError(f"{source} holds {name!r}", why="it was not exported by megatron-run")
        found.setdefault(field, {})[tensor] = partial(reader.tensor, name)
    return Weights(
        config=said["model"],
        tensors=found.pop("", {}),
        step=said["step"],
        sequence_length=said["sequence_length"],
        moments=found,
    )


class _Reader:
    """One tensor at a time; the metadata is read once."""

    def __init__(self, source: Path) -> None:
        self._source = source
        try:
            self.metadata: Metadata = FileSystemReader(source).read_metadata()
        except Exception as error:  # whatever the pickle made it do
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{source / _METADATA} cannot be read", why=why) from error

    def tensor(self, name: str) -> Tensor:
        """The whole tensor, whatever pieces it was saved in."""
        record: Any = self.metadata.state_dict_metadata[name]
        target = torch.empty(record.size, dtype=record.properties.dtype)
        try:
            with _alone():
                load({name: target}, storage_reader=_Known(self._source, self.metadata), no_dist=True)
        except Exception as error:  # torch raises what it likes for files that are missing or cut short
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CheckpointError(f"{name} cannot be read from {self._source}", why=why) from error
        return target


class _Known(FileSystemReader):
    """A reader of tensors that has the metadata already."""

    def __init__(self, source: Path, metadata: Metadata) -> None:
        super().__init__(source)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What was read before."""
        return self._metadata


def _read_all(readers: Mapping[str, Read]) -> dict[str, Tensor]:
    """Views of mapped files mostly, so that nothing is read before torch writes it."""
    return {name: read() for name, read in readers.items()}


def _sidecar(path: Path) -> dict[str, Any]:
    with reading(path) as file:
        try:
            said = json.loads(file.read())
            return {"step": int(said["step"]), "sequence_length": said["sequence_length"], "model": dict(said["model"])}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be used", why=f"{type(error).__name__}: {error}") from error


@contextmanager
def _alone() -> Iterator[None]:
    """One process on its own, of which torch warns; what failed there is raised as itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:  # no Exception, but what wraps those of all ranks
            ((cause, _),) = error.failures.values()
            raise cause from error
