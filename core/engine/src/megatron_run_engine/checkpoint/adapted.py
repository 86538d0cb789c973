"""A step that holds adapters alone: it names the step of the frozen weights, and is read merged with them.

``W + scale * up @ down`` of any box needs the same rows of ``up`` and the same columns of ``down``, so a rank reads no
more than its own part, whatever boxes either step was saved in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_run.contracts.optimizer import MASTER
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.files import hash_of, reading
from megatron_run_engine.checkpoint.manifest import MANIFEST, AdaptersRecord
from megatron_run_engine.checkpoint.reader import Reader
from megatron_run_engine.checkpoint.step_folder import Checkpoints, find_step

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import Adapters
    from megatron_run_engine.checkpoint.manifest import Manifest


def record_of(adapters: Adapters, base: Path | None) -> AdaptersRecord:
    """Return the record of a step with ``adapters``, whose frozen weights are those of the step in ``base``."""
    where, sha256 = ("", "") if base is None else (str(base), _digest(base))
    return AdaptersRecord(
        name=adapters.name,
        down=adapters.down,
        up=adapters.up,
        rank=adapters.rank,
        scale=adapters.scale,
        dropout=adapters.dropout,
        base=where,
        sha256=sha256,
    )


def find_base(record: AdaptersRecord, folder: Path, given: Path | None = None) -> tuple[Checkpoints, int]:
    """Return the step of the frozen weights under the adapters in ``folder``; it may have moved to ``given``.

    Raises :class:`CheckpointError` if it is not where it was, or is another one.
    """
    if not record.base:
        raise CheckpointError(
            f"{folder} holds adapters of random weights",
            why="its run had no run.init_from, so nothing holds the weights that they adapt",
            fix="train adapters of a trained model: --set run.init_from=FOLDER",
        )
    gone = CheckpointError(
        f"the weights that {folder} adapts are not in {record.base}",
        why="a step of adapters holds these alone",
        fix="put the step back there, or resume with --set run.init_from=FOLDER",
    )
    for place in (given, Path(record.base)):
        try:
            found = None if place is None else find_step(place.expanduser().absolute())
            if found is not None and _digest(found[0].folder(found[1])) == record.sha256:
                return found
        except CheckpointError:
            continue
    raise gone


def open_step(checkpoints: Checkpoints, step: int, manifest: Manifest, *, verify: bool = True) -> Reader | MergedReader:
    """Return the reader of ``step``: merged with the weights that it adapts, if it holds adapters.

    The step itself has been verified; ``verify`` compares the bytes of those weights too.
    """
    own, record = Reader(checkpoints.folder(step), manifest), manifest.about.adapters
    if record is None:
        return own
    under, number = find_base(record, checkpoints.folder(step))
    below = under.verify(number) if verify else under.manifest(number)
    return MergedReader(open_step(under, number, below, verify=verify), own, record)


class MergedReader:
    """Reads the weights of ``base`` with the adapters of ``own`` added, as a :class:`Reader` reads weights.

    Adapters can be read too: ``up`` as zeros, since it is in the weights already. So layers with adapters and layers
    without compute the same.
    """

    def __init__(self, base: Reader | MergedReader, own: Reader, record: AdaptersRecord) -> None:
        self.base, self._own, self.record = base, own, record

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the global shape of each logical tensor of the model, adapters left out."""
        return self.base.shapes()

    def with_adapters(self) -> Mapping[str, tuple[int, ...]]:
        """Return the global shape of each logical tensor that can be read."""
        return {**self.base.shapes(), **self._own.shapes()}

    def stems(self) -> list[str]:
        """The names of the matrices that have adapters, without ``.weight``."""
        end = f".{self.record.up}.weight"
        return [name.removesuffix(end) for name in self._own.shapes() if name.endswith(end)]

    def low_rank(self, stem: str) -> tuple[Tensor, Tensor]:
        """``up`` [o, r] and ``down`` [r, i] of the matrix ``stem``. Never write to them."""
        up, down = (self._whole(f"{stem}.{end}.weight") for end in (self.record.up, self.record.down))
        return up, down

    def _whole(self, name: str) -> Tensor:
        shape = self._own.shape(name, MASTER) or ()
        return self._own.read(name, MASTER, (0,) * len(shape), shape)

    def read(self, name: str, field: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box as :meth:`Reader.read` does; there are no fields but masters."""
        if field != MASTER:
            raise CheckpointError(f"merged weights have no {field!r}", why=f"{name} was frozen")
        if name.endswith(f".{self.record.up}.weight"):
            return torch.zeros(tuple(sizes))
        if name.endswith(f".{self.record.down}.weight"):
            return self._own.read(name, field, starts, sizes)
        weight = self.base.read(name, field, starts, sizes)
        stem = name.removesuffix(".weight")
        up, down = (f"{stem}.{each}.weight" for each in (self.record.up, self.record.down))
        shape = self._own.shape(up, MASTER)
        if shape is None:
            return weight
        rank = shape[1]  # of this matrix: those of other programs may have one each
        left = self._own.read(up, MASTER, (starts[0], 0), (sizes[0], rank))
        right = self._own.read(down, MASTER, (0, starts[1]), (rank, sizes[1]))
        return weight + self.record.scale * (left @ right)


def adapters_fault(saved: AdaptersRecord | None, now: Adapters | None) -> Iterator[str]:
    """Yield how the adapters of a saved step are not those of a run."""
    if saved is not None and now is not None:
        for key in ("name", "rank", "scale", "up", "down"):
            if getattr(saved, key) != getattr(now, key):
                yield f"their {key} was {getattr(saved, key)} then, and is {getattr(now, key)} now"
    elif saved is not None:
        yield f"it trained adapters of {saved.name}, and this one trains all weights"
    elif now is not None:
        yield f"it trained all weights, and this one trains adapters of {now.name}"


def _digest(folder: Path) -> str:
    """The SHA-256 of a step's manifest, which holds those of its files. Raises :class:`CheckpointError`."""
    with reading(folder / MANIFEST) as file:
        return hash_of(file, hashlib.sha256())
