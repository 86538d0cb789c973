"""Megatron's ``torch`` format: a folder for each model-parallel rank, ``mp_rank_TT``, ``mp_rank_TT_PPP`` and so on.

The file in it holds the whole state of that rank: ``model``, or ``model0``, ``model1`` ... in an interleaved pipeline.
Each piece of the model numbers its layers from 0. Their global order follows from the pieces: chunk by chunk, and
within a chunk stage by stage. Expert-parallel ranks add one more number, and each numbers its own experts from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron_run.contracts import ReadTensor
from megatron_run.errors import CheckpointError
from megatron_run_format_megatron.tensor_names import NO_WEIGHT, common_name
from megatron_run_format_megatron.untrusted import Inert, load_weights

_RANK = re.compile(r"mp_rank_\d{2}(_\d{3}){0,2}")
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.)(\d+)(\..+)")
_CHUNK = re.compile(r"model\d+")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
#: Since this version query, key and value lie group by group.
_GROUPED = 2.0
#: No model has more heads, experts or ranks: a larger count is damage.
_MOST = 1 << 20
#: The states of expert-parallel ranks, in their order; a single one without expert parallelism.
States = list[dict[str, Any]]


class Found(NamedTuple):
    """The contents of a checkpoint: Megatron's arguments, the step, and the pieces of each tensor by its global name.

    ``masters``: the tensors are the optimizer's fp32 values, of which the model has 16-bit copies.
    """

    arguments: Mapping[str, Any]
    step: int
    tensors: Mapping[str, list[ReadTensor]]
    masters: bool = False


def is_sharded(folder: Path) -> bool:
    """Whether ``folder`` is of this format."""
    return any(_RANK.fullmatch(entry.name) for entry in folder.glob("mp_rank_*"))


def read_shards(folder: Path) -> Found:
    """Open every rank's file in ``folder``; values stay on the disk.

    Raises :class:`CheckpointError` for a rank that is missing, and for ranks that do not hold the same tensors.
    """
    first = min(folder.glob("mp_rank_00*"), default=folder / "mp_rank_00")
    arguments = arguments_of(_state(first), folder)
    try:
        kinds = ("tensor", "pipeline", "expert")
        sizes = {kind: count_of(arguments, f"{kind}_model_parallel_size") or 1 for kind in kinds}
        experts = count_of(arguments, "num_experts") // sizes["expert"]
    except ValueError as error:
        raise CheckpointError(f"the arguments in {folder} are damaged", why=str(error)) from error
    split = arguments.get("expert_tensor_parallel_size")
    if sizes["expert"] > 1 and split not in (None, sizes["tensor"]):
        raise CheckpointError(
            f"{folder} cannot be imported",
            why=f"experts are split over {split} ranks and layers over {sizes['tensor']}",
        )
    states = [
        [
            [_state(folder / _name(rank, stage, expert, sizes)) for expert in range(sizes["expert"])]
            for rank in range(sizes["tensor"])
        ]
        for stage in range(sizes["pipeline"])
    ]
    tensors: dict[str, list[ReadTensor]] = {}
    for name, pieces in _merged(states, experts, folder):
        tensors.setdefault(name, pieces)  # a later stage repeats tied embeddings
    return Found(arguments, step_of(states[0][0][0]), tensors)


def arguments_of(state: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Megatron's saved arguments. Raises :class:`CheckpointError`."""
    saved = state.get("args")
    if not isinstance(saved, Inert):
        raise CheckpointError(f"{source} does not say what model it holds", why="no arguments were saved in it")
    return {name: value for name, value in vars(saved).items() if name != "arguments"}


def count_of(arguments: Mapping[str, Any], name: str) -> int:
    """The count that an argument gives, 0 where it is missing. Raises ValueError for anything else than a count."""
    value = arguments.get(name) or 0
    if not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ValueError(f"{name} is {value!r}")
    return value


def step_of(state: Mapping[str, Any]) -> int:
    """The number of updates; 0 where it was not saved."""
    step = state.get("iteration", 0)
    return step if isinstance(step, int) and step >= 0 else 0


def _name(rank: int, stage: int, expert: int, sizes: Mapping[str, int]) -> str:
    """The folder of a rank; an axis of size 1 has no number."""
    found = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if sizes["pipeline"] > 1 else "")
    return found + (f"_{expert:03d}" if sizes["expert"] > 1 else "")


def _state(home: Path) -> dict[str, Any]:
    """The state that the rank of the folder ``home`` saved."""
    path = next((home / name for name in _FILES if (home / name).is_file()), home / _FILES[0])
    state = load_weights(path)
    if not isinstance(state, dict) or not any(name in state for name in ("model", "model0")):
        raise CheckpointError(f"{path} is no checkpoint of Megatron", why="it has no model in it")
    version = state.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < _GROUPED:
        raise CheckpointError(f"{path} is too old", why=f"its version is {version}; {_GROUPED} and later are read")
    return state


def _merged(states: list[list[States]], experts: int, folder: Path) -> Iterator[tuple[str, list[ReadTensor]]]:
    """Every tensor by its global name, with the pieces of the tensor-parallel ranks."""
    numbers = count()
    for chunk in _chunks(states[0][0][0]):
        for stage in states:
            pieces = [_with_all_experts([each.get(chunk, {}) for each in sharers], experts) for sharers in stage]
            if any(piece.keys() != pieces[0].keys() for piece in pieces):
                raise CheckpointError(f"the ranks in {folder} do not belong together", why="their tensors differ")
            local = sorted({int(match[2]) for name in pieces[0] if (match := _LAYER.fullmatch(name))})
            globally = {number: next(numbers) for number in local}
            for name in pieces[0]:
                yield _renumbered(name, globally), [piece[name].detach for piece in pieces]


def _with_all_experts(models: States, experts: int) -> dict[str, Tensor]:
    """The tensors of one rank, joined by the experts of its expert-parallel peers, ``experts`` each."""
    found = dict(_tensors(models[0]))
    for rank, model in enumerate(models[1:], start=1):
        for name, tensor in _tensors(model):
            match = _EXPERT.fullmatch(name)
            if match:
                found[f"{match[1]}{rank * experts + int(match[2])}{match[3]}"] = tensor
    return found


def _chunks(state: Mapping[str, Any]) -> list[str]:
    """The names of the chunks of the model on one stage, in their order."""
    return ["model"] if "model" in state else sorted((name for name in state if _CHUNK.fullmatch(name)), key=len)


def _renumbered(name: str, numbers: Mapping[int, int]) -> str:
    return _LAYER.sub(lambda match: f"{match[1]}{numbers[int(match[2])]}{match[3]}", name)


def _tensors(state: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Weights by megatron-core's names, out of mappings, which older versions nest."""
    for name, value in state.items() if isinstance(state, dict) else ():
        full = f"{prefix}{name}"
        if isinstance(value, Tensor) and not NO_WEIGHT.fullmatch(full):
            yield common_name(full), value
        elif isinstance(value, dict):
            yield from _tensors(value, f"{full}.")
