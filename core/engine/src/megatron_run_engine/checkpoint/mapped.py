"""Reading a safetensors file through a map of it: what comes from the disk is what is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_run_engine.checkpoint.header import ITEM_BYTES, read_header
from megatron_run_engine.checkpoint.shard_file import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from megatron_run_engine.checkpoint.header import Entry


class TensorFile:
    """The tensors of the file at ``path``. Raises :class:`megatron_run.errors.CheckpointError` for a broken header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.entries: Mapping[str, Entry] = header.entries
        self._data = header.data
        self._content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def read(self, name: str) -> Tensor:
        """The tensor, which shares memory with the file: copy it, and never write into it. Raises KeyError."""
        entry = self.entries[name]
        raw = self._content[self._data + entry.start : self._data + entry.stop]
        if raw.storage_offset() % ITEM_BYTES[entry.dtype]:
            raw = raw.clone()  # a file that others wrote need not be aligned
        return raw.view(DTYPES[entry.dtype]).view(entry.shape)
