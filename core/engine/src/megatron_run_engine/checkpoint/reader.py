"""Reads any box of a logical tensor, whatever boxes it was saved in. This is how a run changes its parallel layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_run.contracts.optimizer import MASTER
from megatron_run.errors import CheckpointError
from megatron_run.errors.wording import advice, did_you_mean
from megatron_run_engine.checkpoint.boxes import Box, box_fault
from megatron_run_engine.checkpoint.manifest import ITEM_BYTES
from megatron_run_engine.checkpoint.shard_file import DTYPES, read_header, tensor_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from megatron_run_engine.checkpoint.manifest import FieldRecord, Manifest
    from megatron_run_engine.checkpoint.shard_file import TensorEntry


class TensorFile:
    """The tensors of the file at ``path``. Raises :class:`CheckpointError` if its header is broken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.entries: Mapping[str, TensorEntry] = header.entries
        self._data = header.data
        try:
            size = path.stat().st_size
            self._content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:  # a training has retired the step since its header was read
            why = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
            raise CheckpointError(f"{path} cannot be read", why=why or "") from error

    def read(self, name: str) -> Tensor:
        """Return the tensor ``name``. It shares memory with the file: copy it, never write to it. Raises KeyError."""
        entry = self.entries[name]
        raw = self._content[self._data + entry.start : self._data + entry.stop]
        if raw.storage_offset() % ITEM_BYTES[entry.dtype]:
            raw = raw.clone()  # view() needs aligned values; files of other writers need not be aligned
        return raw.view(DTYPES[entry.dtype]).view(entry.shape)


class Reader:
    """Reads the tensors of the step in ``folder``, whose files have been verified.

    A file is mapped into memory when it is first needed, so that a rank reads from the disk only the values it needs.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self._manifest = folder, manifest
        self._mapped = cache(lambda file: TensorFile(folder / file))

    @property
    def source(self) -> str:
        """The path that an import read, empty for a run."""
        return self._manifest.about.source

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the global shape of each logical tensor."""
        return {name: fields[MASTER].shape for name, fields in self._manifest.tensors.items() if MASTER in fields}

    def fields(self, name: str) -> frozenset[str]:
        """Return the saved fields of the logical tensor ``name``; none if there is no such tensor."""
        return frozenset(self._manifest.tensors.get(name, ()))

    def shape(self, name: str, field: str) -> tuple[int, ...] | None:
        """Return the global shape of ``field`` of ``name``, or None if it was not saved."""
        record = self._manifest.tensors.get(name, {}).get(field)
        return None if record is None else record.shape

    def read(self, name: str, field: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return the box of ``sizes`` values from ``starts`` on, on the host, in the type in which it was saved.

        The tensor may share memory with the file: copy it, never write to it. Raises :class:`CheckpointError` if there
        is no such tensor, field or box.
        """
        record, wanted = self._find(name, field), Box(tuple(starts), tuple(sizes))
        fault = box_fault(record.shape, wanted)
        if fault:
            raise CheckpointError(f"{field} of {name} cannot be read from {self.folder}", why=fault)
        result: Tensor | None = None
        for piece in record.pieces:
            common = piece.box.common(wanted)
            if common is None:
                continue
            values = self._piece(piece.file, name, field, piece.box, record)[common.within(piece.box)]
            if common == wanted:
                return values  # one piece holds the whole box: no copy
            result = torch.empty(wanted.sizes, dtype=DTYPES[record.dtype]) if result is None else result
            result[common.within(wanted)] = values
        assert result is not None, "the pieces cover the tensor: the manifest was checked"
        return result

    def _find(self, name: str, field: str) -> FieldRecord:
        fields = self._manifest.tensors.get(name)
        if fields is None:
            fix = did_you_mean(name, self._manifest.tensors)
            raise CheckpointError(f"{self.folder} holds no tensor {name!r}", fix=fix)
        if field not in fields:
            fix = advice(did_you_mean(field, fields), f"it has {', '.join(fields)}")
            raise CheckpointError(f"{self.folder} holds no {field!r} of {name}", fix=fix)
        return fields[field]

    def _piece(self, file: str, name: str, field: str, box: Box, record: FieldRecord) -> Tensor:
        """Return a whole piece as a view of the mapped file."""
        mapped = self._mapped(file)
        called = tensor_name(name, field, box)
        entry = mapped.entries.get(called)
        if entry is None or (entry.dtype, entry.shape) != (record.dtype, box.sizes):
            raise CheckpointError(f"{self.folder / file} does not hold what the manifest says", why=f"{name}{box}")
        return mapped.read(called)


class Rehearsal(Reader):
    """A reader of zeros, which notes in ``files`` where the values would have come from."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder, manifest)
        self.files: set[str] = set()

    def read(self, name: str, field: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return zeros for the box. Raises :class:`CheckpointError` where there is none."""
        record, wanted = self._find(name, field), Box(tuple(starts), tuple(sizes))
        self.files.update(piece.file for piece in record.pieces if piece.box.common(wanted) is not None)
        return torch.zeros(wanted.sizes, dtype=DTYPES[record.dtype])
