"""Megatron's ``torch_dist`` format: whole tensors in chunks, in the files of torch.distributed.checkpoint.

``.metadata`` tells where in which file each box of each tensor lies; ``common.pt`` holds the arguments. A layer has
tensors of its own, ``decoder.layers.3.mlp...``, or is an index into stacked ones, ``decoder.layers.mlp...``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_run.contracts import ReadTensor
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint import Box, cover_fault, reading
from megatron_run_format_megatron.rank_files import (
    Found,
    arguments_of,
    load_metadata,
    load_tensor,
    load_weights,
    step_of,
)
from megatron_run_format_megatron.tensor_names import NO_WEIGHT, common_name

_ABOUT, _COMMON, _METADATA = "metadata.json", "common.pt", ".metadata"
_STACKED = re.compile(r"^decoder\.layers\.(?!\d+\.)(.+)")
#: Experts may be stacked too, along the dimension after that of the layers.
_EXPERTS = ".mlp.experts.experts.linear"
#: More tensors are stacked in none: the experts of all layers are some ten thousand.
_MOST_STACKED = 1 << 17
#: Prefixes of the optimizer's fp32 weights, and names of other state.
_MASTERS = ("optimizer.state.fp32_param", "optimizer.state.param")
_STATE = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state")


class StoredBox(NamedTuple):
    """Where a box of a tensor lies: ``length`` bytes from ``start`` of ``file``, as torch.save wrote them."""

    box: Box
    file: str
    start: int
    length: int


class Stored(NamedTuple):
    """One tensor: its global shape, the type of its values, and its boxes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[StoredBox, ...]


def is_distributed(folder: Path) -> bool:
    """Whether ``folder`` is a distributed checkpoint of Megatron, be it of another back end."""
    return (folder / _ABOUT).is_file() and ((folder / _COMMON).is_file() or (folder / _METADATA).is_file())


def read_distributed(folder: Path) -> Found:
    """Find where every tensor lies; values stay on the disk. Raises :class:`CheckpointError`."""
    _check_backend(folder / _ABOUT)
    common = load_weights(folder / _COMMON)
    if not isinstance(common, dict):
        raise CheckpointError(f"{folder / _COMMON} is damaged", why="it is no mapping")
    stored = read_places(folder / _METADATA)
    names = [name for name in stored if not (_STATE.match(name) or NO_WEIGHT.fullmatch(name))]
    masters = {name: found for name in names if (found := _master(name, stored))}
    readers = {
        each: pieces
        for name in names
        for each, pieces in _readers(folder, name, *masters.get(name, (name, stored[name])))
    }
    return Found(arguments_of(common, folder), step_of(common), readers, masters=len(masters) == len(names))


def read_places(path: Path) -> dict[str, Stored]:
    """Every tensor of the ``.metadata`` at ``path``, its boxes checked to cover it. Raises :class:`CheckpointError`."""
    metadata = load_metadata(path)
    try:
        boxes: dict[str, list[StoredBox]] = {}
        for index, info in metadata.storage_data.items():
            if getattr(index, "offset", None) is None:
                continue  # an object, no tensor
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(f"{path.parent} cannot be read", why="its files are compressed")
            sizes = next(
                tuple(map(int, chunk.sizes))
                for chunk in metadata.state_dict_metadata[index.fqn].chunks
                if tuple(chunk.offsets) == tuple(index.offset)
            )
            box = Box(tuple(map(int, index.offset)), sizes)
            part = StoredBox(box, _plain_name(info.relative_path), int(info.offset), int(info.length))
            boxes.setdefault(str(index.fqn), []).append(part)
        found = {
            name: Stored(tuple(map(int, about.size)), about.properties.state[0], tuple(boxes[name]))
            for name, about in metadata.state_dict_metadata.items()
            if hasattr(about, "chunks")
        }
    except (AttributeError, KeyError, TypeError, ValueError, StopIteration) as error:
        raise CheckpointError(f"{path} is damaged", why=f"{type(error).__name__}: {error}") from error
    for name, stored in found.items():
        fault = cover_fault(stored.shape, [part.box for part in stored.boxes]) if prod(stored.shape) else ""
        if fault:
            raise CheckpointError(f"{path} is damaged", why=f"{name}: {fault}")
    return found


def read_box(folder: Path, name: str, stored: Stored, box: Box) -> Tensor:
    """One box of a tensor, assembled from the stored boxes. Raises :class:`CheckpointError`."""
    result = torch.empty(box.sizes, dtype=stored.dtype)
    for part in stored.boxes:
        common = part.box.common(box)
        if common is None:
            continue
        with reading(folder / part.file) as file:
            file.seek(part.start)
            content = file.read(part.length)
        piece = load_tensor(content, f"{name} in {folder / part.file}")
        if tuple(piece.shape) != part.box.sizes:
            raise CheckpointError(f"{folder / part.file} is damaged", why=f"{name} is {list(piece.shape)} there")
        result[common.within(box)] = piece[common.within(part.box)]
    return result


def _master(name: str, stored: Mapping[str, Stored]) -> tuple[str, Stored] | None:
    """The optimizer's fp32 values of the weight ``name``, if they have its shape."""
    found = (f"{prefix}.{name}" for prefix in _MASTERS)
    return next(
        ((each, stored[each]) for each in found if each in stored and stored[each].shape == stored[name].shape), None
    )


def _readers(folder: Path, name: str, key: str, stored: Stored) -> Iterator[tuple[str, list[ReadTensor]]]:
    """Readers of the tensor ``name``, stored under ``key``, one for each layer and expert."""
    pattern = _STACKED.sub(r"decoder.layers.{}.\1", name)
    pattern = pattern.replace(_EXPERTS, f"{_EXPERTS[: -len('linear')]}{{}}.linear")
    axes, shape = pattern.count("{}"), stored.shape
    if prod(shape[:axes]) > _MOST_STACKED:
        raise CheckpointError(f"{folder / _METADATA} is damaged", why=f"{name} stacks {list(shape[:axes])} tensors")
    for indices in product(*map(range, shape[:axes])):
        box = Box((*indices, *(0,) * len(shape[axes:])), (*(1,) * axes, *shape[axes:]))
        yield common_name(pattern.format(*indices)), [partial(_flattened, folder, key, stored, box, axes)]


def _flattened(folder: Path, name: str, stored: Stored, box: Box, axes: int) -> Tensor:
    """One box, without its first ``axes`` dimensions, which are 1."""
    return read_box(folder, name, stored, box).view(box.sizes[axes:])


def _check_backend(path: Path) -> None:
    with reading(path) as file:
        try:
            about: Any = json.loads(file.read(1 << 16))
            backend = about["sharded_backend"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged", why=f"{type(error).__name__}: {error}") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{path.parent} cannot be read", why=f"its format is {backend!r}; torch_dist is read")


def _plain_name(name: object) -> str:
    if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not the name of a file in the folder")
    return name
