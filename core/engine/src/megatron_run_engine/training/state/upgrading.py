"""State that an older version of a plugin saved, as its version of now reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_run.contracts import MASTER
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.boxes import Box, box_fault

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.registry.loaded_plugin import Plugin
    from megatron_run_engine.checkpoint.manifest import PluginRecord
    from megatron_run_engine.checkpoint.reader import Reader

#: Makes of saved state what is read now.
Upgrade = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def find_upgrade(writer: PluginRecord, plugin: Plugin, step: int) -> Upgrade | None:
    """What ``plugin`` makes of the state that ``writer``, the same plugin, saved at ``step``; None: it stays as it is.

    Raises :class:`CheckpointError` when it cannot read that version. So does the upgrade itself when it fails.
    """
    before, info = writer.state_version, plugin.info
    if before == info.state_version:
        return None
    if before > info.state_version or info.upgrade_state is None:
        raise CheckpointError(
            f"step {step} holds state of version {before} of {plugin}",
            why=f"{plugin.source} writes and reads version {info.state_version}",
            fix=f"install {writer.source}",
        )
    upgrade_state = info.upgrade_state

    def upgrade(state: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return upgrade_state(state, before)
        except Exception as error:
            raise CheckpointError(
                f"{plugin} of {plugin.source} cannot read the state of version {before} in step {step}",
                why=f"its upgrade_state raised {type(error).__name__}: {error}",
                fix=f"install {writer.source}",
            ) from error

    return upgrade


class UpgradingReader:
    """Reads a step as if the optimizer of now had saved it: with ``fields`` and ``read`` of a :class:`Reader`.

    The fields of a box are upgraded together. Those that are no box of the weights, as the count of steps, are given
    whole; with one that is asked for by itself come the others' first values.
    """

    def __init__(self, reader: Reader, upgrade: Upgrade) -> None:
        self._reader, self._upgrade = reader, upgrade
        self._last: tuple[str, Box] | None = None
        self._upgraded: Mapping[str, Any] = {}

    def fields(self, name: str) -> frozenset[str]:
        """The fields of the logical tensor ``name`` after the upgrade; none when there is no such tensor."""
        shape = self._reader.shape(name, MASTER)
        return frozenset() if shape is None else frozenset(self._box(name, _first(shape)))

    def read(self, name: str, field: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The box of ``field`` of ``name``, on the host. Raises :class:`CheckpointError` when there is none."""
        wanted, shape = Box(tuple(starts), tuple(sizes)), self._reader.shape(name, MASTER)
        if shape is None:
            return self._reader.read(name, field, starts, sizes)  # which says what is wrong
        value: Tensor = self._box(name, _first(shape) if box_fault(shape, wanted) else wanted)[field]
        if tuple(value.shape) == wanted.sizes:
            return value
        why = f"it has the shape {list(value.shape)}, the optimizer wants {list(sizes)}"
        raise CheckpointError(f"the upgraded {field} of {name} is not what it should be", why=why)

    def _box(self, name: str, box: Box) -> Mapping[str, Any]:
        """All upgraded fields of ``box``: an optimizer asks for one after the other."""
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
    """The first value of a tensor."""
    return Box((0,) * len(shape), tuple(min(1, size) for size in shape))
