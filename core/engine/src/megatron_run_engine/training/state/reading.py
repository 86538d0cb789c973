"""Reads the state of a saved step for an optimizer: as another version saved it, or from zeros, with permission."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megatron_run.contracts import MASTER
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.boxes import Box, box_fault
from megatron_run_engine.checkpoint.reader import Reader

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import ReadState


#: Converts the state that an older version of a plugin saved to the current version's state.
Upgrade = Callable[[Mapping[str, Any]], Mapping[str, Any]]
Found = TypeVar("Found")


def load(into: Callable[[ReadState], None], read: ReadState) -> None:
    """Load through ``read`` with an optimizer's method ``into``, then raise the first error of a read, if any.

    An optimizer all-gathers parameters after it has read them, and the other ranks would wait for a rank that left
    with an error. So a failed read returns zeros, as do all later ones, and the error is raised at the end.
    """
    patient = _Patient(read)
    into(patient)
    if patient.failure is not None:
        raise patient.failure


class _Patient:
    """Reads through ``read``, and lists fields as a :class:`StateReader` does; zeros from the first ``failure`` on."""

    def __init__(self, read: ReadState) -> None:
        self._read = read
        self.failure: Exception | None = None

    def __call__(self, name: str, field: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        return self._try(lambda: self._read(name, field, starts, sizes), torch.zeros(sizes))

    def shapes(self, name: str) -> Mapping[str, tuple[int, ...]]:
        read = self._read
        return self._try(lambda: read.shapes(name), {}) if isinstance(read, StateReader) else {}

    def _try(self, ask: Callable[[], Found], otherwise: Found) -> Found:
        if self.failure is None:
            try:
                return ask()
            except Exception as error:  # any error: the other ranks wait in a collective
                self.failure = error
        return otherwise


class StateReader:
    """Reads state for ``optimizer``. With ``zeros_if_missing`` a field that was not saved starts from zeros."""

    def __init__(self, reader: Reader | UpgradingReader, optimizer: str, *, zeros_if_missing: bool) -> None:
        self._reader, self._optimizer, self._zeros_if_missing = reader, optimizer, zeros_if_missing

    def __call__(self, name: str, field: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return the box. Raises :class:`CheckpointError` if it was not saved and must not start from zeros."""
        known = self._reader.fields(name)
        if field in known or not known:
            return self._reader.read(name, field, starts, sizes)
        if self._zeros_if_missing:
            return torch.zeros(sizes)
        raise CheckpointError(
            f"the checkpoint has no {field} of {name}, which {self._optimizer} needs",
            why=f"it has {', '.join(sorted(known))}",
            fix="choose the optimizer that saved it, or start its state anew: --allow-plugin-change optimizer",
        )

    def shapes(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all fields of ``name``; none if state starts anew, since another rule may have saved."""
        if self._zeros_if_missing:
            return {}
        shapes = {field: self._reader.shape(name, field) for field in sorted(self._reader.fields(name))}
        return {field: shape for field, shape in shapes.items() if shape is not None}


class UpgradingReader:
    """Reads a step as if the current version of the optimizer had saved it. Has some methods of ``Reader``.

    ``upgrade`` gets all fields of one box together. A field whose shape is not that of the weights, such as a step
    count, is passed whole. If such a field is requested itself, the others are passed with their first value only.
    """

    def __init__(self, reader: Reader, upgrade: Upgrade) -> None:
        self._reader, self._upgrade = reader, upgrade
        self._last: tuple[str, Box] | None = None  # the box of _upgraded: an optimizer reads its fields in a row
        self._upgraded: Mapping[str, Any] = {}

    def fields(self, name: str) -> frozenset[str]:
        """Return the fields of the logical tensor ``name`` after the upgrade; none if there is no such tensor."""
        shape = self._reader.shape(name, MASTER)
        return frozenset() if shape is None else frozenset(self._box(name, _first(shape)))

    def shape(self, name: str, field: str) -> tuple[int, ...] | None:
        """Return the shape of ``field`` of ``name`` after the upgrade, or None if there is none."""
        shape = self._reader.shape(name, MASTER)
        value = None if shape is None else self._box(name, _first(shape)).get(field)
        if shape is None or value is None:
            return None
        return shape if tuple(value.shape) == _first(shape).sizes else tuple(value.shape)

    def read(self, name: str, field: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of ``field`` of ``name``, on the host. Raises :class:`CheckpointError` if there is none."""
        wanted, shape = Box(tuple(starts), tuple(sizes)), self._reader.shape(name, MASTER)
        if shape is None:
            return self._reader.read(name, field, starts, sizes)  # raises the right error
        value: Tensor = self._box(name, _first(shape) if box_fault(shape, wanted) else wanted)[field]
        if tuple(value.shape) == wanted.sizes:
            return value
        why = f"it has the shape {list(value.shape)}, the optimizer wants {list(sizes)}"
        raise CheckpointError(f"the upgraded {field} of {name} is not what it should be", why=why)

    def _box(self, name: str, box: Box) -> Mapping[str, Any]:
        """Return all upgraded fields of ``box``."""
        if self._last != (name, box):
            saved = {field: self._saved(name, field, box) for field in self._reader.fields(name)}
            self._last, self._upgraded = (name, box), self._upgrade(saved)
        return self._upgraded

    def _saved(self, name: str, field: str, box: Box) -> Tensor:
        shape = self._reader.shape(name, field)
        assert shape is not None, "it is one of the fields"
        if shape == self._reader.shape(name, MASTER):
            return self._reader.read(name, field, *box)
        return self._reader.read(name, field, (0,) * len(shape), shape)


def _first(shape: tuple[int, ...]) -> Box:
    """Return the box of the first value of a tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(min(1, size) for size in shape))
