"""Adapters of a saved step for another program, and those of another program upon a saved step."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import torch

from megatron_run.contracts import Adapters, AdapterWeights
from megatron_run.errors import CheckpointError, InputError
from megatron_run.errors.wording import advice, from_hub
from megatron_run_engine.checkpoint.adapted import MergedReader
from megatron_run_engine.checkpoint.step_folder import find_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from megatron_run_engine.checkpoint.reader import Reader
    from megatron_run_engine.checkpoint.step_folder import Checkpoints


def saved_adapters(reader: MergedReader) -> AdapterWeights:
    """The adapters in a saved step, for the weights at the bottom.

    Where those beneath it are merged with adapters themselves, A has the rows of both, and B the columns:
    ``s B A + s' B' A' = s [B, s'/s B'] [A; A']``.
    """
    layers, bottom = _layers(reader)
    record = layers[0].record
    how = Adapters(record.name, record.down, record.up, record.rank, record.scale, record.dropout)
    holding: dict[str, list[MergedReader]] = {}
    for layer in layers:
        for stem in layer.stems():
            holding.setdefault(stem, []).append(layer)
    tensors = {}
    for stem, holders in holding.items():
        tensors[f"{stem}.{how.down}.weight"] = partial(_down, stem, holders)
        tensors[f"{stem}.{how.up}.weight"] = partial(_up, stem, holders, how.scale)
    return AdapterWeights(how, tensors, base=bottom.source)


def _layers(reader: MergedReader) -> tuple[list[MergedReader], Reader]:
    """The steps of adapters, the newest first, and the one of weights alone."""
    found, below = [reader], reader.base
    while isinstance(below, MergedReader):
        found.append(below)
        below = below.base
    return found, below


def _down(stem: str, layers: Sequence[MergedReader]) -> Tensor:
    """A [r, i]."""
    return _joined([layer.low_rank(stem)[1] for layer in layers], 0)


def _up(stem: str, layers: Sequence[MergedReader], scale: float) -> Tensor:
    """B [o, r], of products that are multiplied by ``scale``."""
    scaled = ((layer.low_rank(stem)[0], layer.record.scale) for layer in layers)
    return _joined([up if own == scale else up * (own / scale) for up, own in scaled], 1)


def _joined(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _folder(name: str) -> Path | None:
    """The folder ``name``, which another program wrote; None where there is none, as for a text that is no path."""
    with suppress(OSError, ValueError):
        return Path(name) if name and Path(name).is_dir() else None
    return None


def find_adapted(source: Path, base: str, given: Path | None) -> tuple[Checkpoints, int]:
    """The saved step that the adapters at ``source`` adapt: of the folder ``given``, else of the ``base`` they name.

    Raises :class:`InputError` where there is none.
    """
    where = given.expanduser() if given else _folder(base)
    new = f"megatron-run import {quote(str(source))} NEW --base"
    if where is None:
        raise InputError(
            f"{source} holds adapters of {base or 'a model that it does not name'}",
            why="which is no folder here",
            fix=advice(f"import that model as BASE, then: {new} BASE", from_hub(Path(base)) if base else ""),
        )
    try:
        return find_step(where.absolute())
    except CheckpointError as error:
        if not where.is_dir():
            raise
        raise InputError(
            f"no weights are saved in {where}, the model that {source} adapts",
            fix=f"import it: megatron-run import {quote(str(where))} BASE, then: {new} BASE",
        ) from error


def check_adapters(adapters: AdapterWeights, shapes: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """Raise :class:`CheckpointError` unless each A and B fits its matrix; ``shapes`` are those of the model."""
    faults = list(_faults(adapters, shapes))
    if faults:
        raise CheckpointError(f"the adapters in {source} do not fit the model", why="; ".join(faults))


def _faults(adapters: AdapterWeights, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    if not adapters.tensors:
        yield "there are none"
    ends = [f".{end}.weight" for end in (adapters.how.down, adapters.how.up)]
    for stem in dict.fromkeys(name.removesuffix(ends[0]).removesuffix(ends[1]) for name in adapters.tensors):
        both, matrix = [f"{stem}{end}" for end in ends], shapes.get(f"{stem}.weight", ())
        if len(matrix) != len(ends) or not all(name in adapters.tensors for name in both):
            yield f"{stem} has no matrix, or lacks one of its two adapters"
            continue
        down, up = (tuple(adapters.tensors[name]().shape) for name in both)
        if len(down) != len(ends) or (down[1], up) != (matrix[1], (matrix[0], down[0])):
            yield f"A is {list(down)} and B {list(up)} for {stem}, which is {list(matrix)}"
