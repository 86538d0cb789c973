"""Megatron's ``torch`` format: a folder for each model-parallel rank, ``mp_rank_TT`` or ``mp_rank_TT_PPP``.

The file in it holds the whole state of that rank, ``model``, or ``model0``, ``model1`` ... where the pipeline is
interleaved. Layers are numbered anew in each piece of the model, so that their order follows from the pieces: chunk by
chunk, and in a chunk stage by stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron_run.errors import CheckpointError
from megatron_run.interchange.megatron.names import NO_WEIGHT, modern_name
from megatron_run.interchange.untrusted import Inert, load_weights
from megatron_run.interchange.weights import Read

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_CHUNK = re.compile(r"model\d+")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
#: Since this version query, key and value lie group by group; before it they lay otherwise.
_GROUPED = 2.0


class Found(NamedTuple):
    """What a checkpoint holds: Megatron's arguments, the step, and the pieces of each tensor by its global name.

    ``masters``: they are the fp32 values of the optimizer, of which the model has copies in 16 bits.
    """

    arguments: Mapping[str, Any]
    step: int
    tensors: Mapping[str, list[Read]]
    masters: bool = False


def is_sharded(folder: Path) -> bool:
    """Whether ``folder`` is of this format."""
    return any(_RANK.fullmatch(entry.name) for entry in folder.glob("mp_rank_*"))


def read_shards(folder: Path) -> Found:
    """Open every rank's file in ``folder``; values stay on the disk until they are read.

    Raises :class:`CheckpointError` for a rank that is missing, and for ranks that do not hold the same tensors.
    """
    first = _state(folder, 0, 0, staged=(folder / "mp_rank_00_000").is_dir())
    arguments = arguments_of(first, folder)
    ranks, stages = (int(arguments.get(f"{kind}_model_parallel_size", 1)) for kind in ("tensor", "pipeline"))
    states = [
        [first if (rank, stage) == (0, 0) else _state(folder, rank, stage, staged=stages > 1) for rank in range(ranks)]
        for stage in range(stages)
    ]
    tensors: dict[str, list[Read]] = {}
    for name, pieces in _merged(states, folder):
        tensors.setdefault(name, pieces)  # what a later stage repeats is the same
    return Found(arguments, step_of(first), tensors)


def arguments_of(state: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Megatron's arguments as they were saved. Raises :class:`CheckpointError`."""
    saved = state.get("args")
    if not isinstance(saved, Inert):
        raise CheckpointError(f"{source} does not say what model it holds", why="no arguments were saved in it")
    return {name: value for name, value in vars(saved).items() if name != "arguments"}


def step_of(state: Mapping[str, Any]) -> int:
    """The number of updates; 0 where it was not saved."""
    step = state.get("iteration", 0)
    return step if isinstance(step, int) and step >= 0 else 0


def _state(folder: Path, rank: int, stage: int, *, staged: bool) -> dict[str, Any]:
    """What rank ``rank`` of stage ``stage`` saved."""
    home = folder / (f"mp_rank_{rank:02d}_{stage:03d}" if staged else f"mp_rank_{rank:02d}")
    path = next((home / name for name in _FILES if (home / name).is_file()), home / _FILES[0])
    state = load_weights(path)
    if not isinstance(state, dict) or not any(name in state for name in ("model", "model0")):
        raise CheckpointError(f"{path} is no checkpoint of Megatron", why="it has no model in it")
    version = state.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < _GROUPED:
        raise CheckpointError(f"{path} is too old", why=f"its version is {version}; {_GROUPED} and later are read")
    return state


def _merged(states: list[list[dict[str, Any]]], folder: Path) -> Iterator[tuple[str, list[Read]]]:
    """Every tensor by its global name, with the pieces of the tensor-parallel ranks."""
    numbers = count()
    for chunk in _chunks(states[0][0]):
        for stage in states:
            pieces = [dict(_tensors(state.get(chunk, {}))) for state in stage]
            if any(piece.keys() != pieces[0].keys() for piece in pieces):
                raise CheckpointError(f"the ranks in {folder} do not belong together", why="their tensors differ")
            local = sorted({int(match[2]) for name in pieces[0] if (match := _LAYER.fullmatch(name))})
            globally = {number: next(numbers) for number in local}
            for name in pieces[0]:
                yield _renumbered(name, globally), [partial(_itself, piece[name]) for piece in pieces]


def _chunks(state: Mapping[str, Any]) -> list[str]:
    """The names of the pieces of the model on one stage, in their order."""
    return ["model"] if "model" in state else sorted((name for name in state if _CHUNK.fullmatch(name)), key=len)


def _renumbered(name: str, numbers: Mapping[int, int]) -> str:
    return _LAYER.sub(lambda match: f"{match[1]}{numbers[int(match[2])]}{match[3]}", name)


def _tensors(state: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Weights by megatron-core's name, out of mappings that older versions nested."""
    for name, value in state.items() if isinstance(state, dict) else ():
        full = f"{prefix}{name}"
        if isinstance(value, Tensor) and not NO_WEIGHT.fullmatch(full):
            yield modern_name(full), value
        elif isinstance(value, dict):
            yield from _tensors(value, f"{full}.")


def _itself(tensor: Tensor) -> Tensor:
    return tensor.detach()
