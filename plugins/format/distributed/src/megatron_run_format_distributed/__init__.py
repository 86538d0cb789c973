"""Folders of ``torch.distributed.checkpoint``, with masters and moments, and a JSON file that describes the model.

The ``.metadata`` of such a folder is a pickle, which torch writes and reads, and reading a pickle executes it. So an
import needs ``--trust-pickle``.

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

from megatron_run.contracts import Format, PluginInfo, ReadTensor, Weights
from megatron_run.errors import CheckpointError
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.checkpoint import FileSystem, read_whole
from megatron_run_engine.data import holds_tokenizer

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata

#: Our description of the model, a file that torch ignores.
SIDECAR = "megatron-run.json"
_METADATA, _MODEL, _OPTIMIZER = ".metadata", "model", "optimizer"


class Distributed(Format):
    """Masters and moments under our names, for any program that calls ``torch.distributed.checkpoint.load``."""

    files = f"{_METADATA} and {SIDECAR}"
    executes = "torch.distributed.checkpoint reads .metadata with pickle, which executes what the file says"

    def recognises(self, source: Path) -> bool:
        """Whether ``source`` is such a folder with our description of its model."""
        return (source / _METADATA).is_file() and (source / SIDECAR).is_file()

    def write(self, weights: Weights, folder: Path) -> None:
        """Write masters and moments, then the description of the model. It can hold any model."""
        state: dict[str, Any] = {_MODEL: _read_all(weights.tensors)}
        if weights.moments:
            state[_OPTIMIZER] = {field: _read_all(readers) for field, readers in weights.moments.items()}
        with _in_one_process():
            save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
        about = {"step": weights.step, "sequence_length": weights.sequence_length, "model": dict(weights.config)}
        files = FileSystem()
        with files.create(folder / SIDECAR) as file:
            file.write(json.dumps(about, indent=2).encode())
            file.sync()
        files.sync_folder(folder)

    def read(self, source: Path) -> Weights:
        """The files that :meth:`write` wrote, and the tokenizer that an export put beside it.

        Executes what ``.metadata`` says. Raises :class:`CheckpointError`.
        """
        about = _sidecar(source / SIDECAR)
        reader = _TensorReader(source)
        found: dict[str, dict[str, ReadTensor]] = {}
        for name, record in reader.metadata.state_dict_metadata.items():
            kind, _, rest = name.partition(".")
            field, _, tensor = rest.partition(".") if kind == _OPTIMIZER else ("", "", rest)
            if kind not in (_MODEL, _OPTIMIZER) or not hasattr(record, "size"):
                raise CheckpointError(f"{source} holds {name!r}", why="it was not exported by megatron-run")
            found.setdefault(field, {})[tensor] = partial(reader.tensor, name)
        return Weights(
            config=about["model"],
            tensors=found.pop("", {}),
            step=about["step"],
            sequence_length=about["sequence_length"],
            moments=found,
            tokenizer=source if holds_tokenizer(source) else None,
        )


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("format", "distributed", provides=frozenset({"import", "export"}))


@hookimpl
def megatron_run_create_format() -> Format:
    """Make the format."""
    return Distributed()


class _TensorReader:
    """Reads one tensor at a time; the metadata is read once."""

    def __init__(self, source: Path) -> None:
        self._source = source
        try:
            self.metadata: Metadata = FileSystemReader(source).read_metadata()
        except Exception as error:  # a pickle can raise anything
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{source / _METADATA} cannot be read", why=why) from error

    def tensor(self, name: str) -> Tensor:
        """The whole tensor, however it was split."""
        record: Any = self.metadata.state_dict_metadata[name]
        target = torch.empty(record.size, dtype=record.properties.dtype)
        try:
            with _in_one_process():
                load({name: target}, storage_reader=_Prepared(self._source, self.metadata), no_dist=True)
        except Exception as error:  # torch raises many types for missing or truncated files
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CheckpointError(f"{name} cannot be read from {self._source}", why=why) from error
        return target


class _Prepared(FileSystemReader):
    """A reader that has the metadata already: torch's would read the pickle again for every tensor."""

    def __init__(self, source: Path, metadata: Metadata) -> None:
        super().__init__(source)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata that was read once."""
        return self._metadata


def _read_all(readers: Mapping[str, ReadTensor]) -> dict[str, Tensor]:
    """The tensors, mostly views of mapped files, so that values are read when torch writes them."""
    return {name: read() for name, read in readers.items()}


def _sidecar(path: Path) -> dict[str, Any]:
    content = read_whole(path)
    try:
        about = json.loads(content)
        return {
            "step": int(about["step"]),
            "sequence_length": about["sequence_length"],
            "model": dict(about["model"]),
        }
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be used", why=f"{type(error).__name__}: {error}") from error


@contextmanager
def _in_one_process() -> Iterator[None]:
    """Without a process group, of which torch warns. A failure is raised as itself, not as one of many ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:  # a BaseException that wraps those of all ranks
            ((cause, _),) = error.failures.values()
            raise cause from error
