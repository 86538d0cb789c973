"""Megatron's ``torch`` format: a folder for each model-parallel rank, ``mp_rank_TT``, ``mp_rank_TT_PPP`` and so on.

The file in it holds the whole state of that rank: ``model``, or ``model0``, ``model1`` ... in an interleaved pipeline.
Each piece of the model numbers its layers from 0. Their global order follows from the pieces: chunk by chunk, and
within a chunk stage by stage. Expert-parallel ranks add one more number, and each numbers its own experts from 0.

A pickle of unknown origin is read without executing anything. A pickle is a program that names functions and calls
them. Two interpreters are used here, and neither imports what a file names: PyTorch's for weights only, and Python's
with a ``find_class`` that looks names up in a table and nowhere else. Tensors and dtypes are real. Any other object in
the tables becomes an :class:`Inert`, which stores its arguments and does nothing. A file that names anything else is
refused.
"""

from __future__ import annotations

import pickle
import pickletools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from megatron_run.contracts import ReadTensor
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint import read_whole, reading
from megatron_run_format_megatron.tensor_names import NO_WEIGHT, common_name

#: What may accompany weights: arguments and their types, and the state of random generators.
_BESIDE_WEIGHTS = frozenset(
    {
        "argparse.Namespace",
        "types.SimpleNamespace",
        "pathlib.Path",
        "pathlib.PosixPath",
        "signal.Signals",
        "_io.BytesIO",
        "numpy.ndarray",
        "numpy.dtype",
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    }
)
#: Opcodes that put an object into the memo, and the most bytes of a ``.metadata``: the largest models have 20 MB.
_MEMO, _LARGEST_METADATA = ("PUT", "BINPUT", "LONG_BINPUT"), 1 << 28
#: All classes of Megatron-LM, mostly enumerations, become inert.
_MEGATRON = "megatron."
#: The classes that torch.distributed.checkpoint's metadata consists of, and the plans that Megatron adds.
_METADATA = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "pathlib": ("PosixPath",),
}


class Inert:
    """Replaces an object by its ``arguments`` and its ``state``, without behaviour.

    A state that is a mapping becomes attributes.
    """

    arguments: tuple[object, ...] = ()

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            vars(self).update({str(name): value for name, value in state.items()})
        else:
            self.state = state


def load_weights(path: Path) -> Any:
    """The content that ``torch.save`` wrote into ``path``: tensors mapped from the file, and plain data around them.

    Raises :class:`CheckpointError` for a file that asks for an object outside the tables, naming it.
    """
    with reading(path):
        return _load(str(path), str(path), mapped=True)


def load_tensor(content: bytes, name: str) -> Tensor:
    """The tensor that ``torch.save`` wrote as ``content``; ``name`` is for messages.

    Raises :class:`CheckpointError`.
    """
    found = _load(BytesIO(content), name, mapped=False)
    if not isinstance(found, Tensor):
        raise CheckpointError(f"{name} is damaged", why="it is no tensor")
    return found


def load_metadata(path: Path) -> Any:
    """The ``.metadata`` of torch.distributed.checkpoint at ``path``, with every object inert.

    Raises :class:`CheckpointError` for a file that asks for an object outside the tables.
    """
    content = read_whole(path, _LARGEST_METADATA)
    try:
        _check_opcodes(content)
        return _Metadata(BytesIO(content)).load()
    except _ForeignError as error:
        raise _refused(str(path), str(error)) from None
    except Exception as error:  # a damaged stream can raise anything
        raise _damaged(str(path), error) from error


def _check_opcodes(content: bytes) -> None:
    """Raise ValueError for a pickle that asks for memory without giving anything to put there.

    The interpreter makes room for a place in its memo, or for an array of bytes, before it sees what follows.
    """
    for before, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name in _MEMO and isinstance(argument, int) and argument > before:
            raise ValueError(f"place {argument} of the memo before there are as many objects")
        if opcode.name in ("BYTEARRAY8", "NEXT_BUFFER"):
            raise ValueError(f"it has a {opcode.name}, of which no metadata consists")


def _check_records(file: str | BytesIO) -> None:
    """Raise ValueError for what is no archive, or one that grows when it is read: torch compresses nothing."""
    with ZipFile(file) as archive:
        packed = next((each for each in archive.infolist() if each.compress_type != ZIP_STORED), None)
    if packed is not None:
        raise ValueError(f"{packed.filename} in it is compressed, to {packed.file_size} bytes")


def _load(file: str | BytesIO, name: str, *, mapped: bool) -> Any:
    with _nothing_else_allowed():
        try:
            _check_records(file)
            if isinstance(file, BytesIO):
                file.seek(0)
            named = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        except Exception as error:
            raise _damaged(name, error) from error
        foreign = sorted(each for each in named if each not in _BESIDE_WEIGHTS and not each.startswith(_MEGATRON))
        if foreign:
            raise _refused(name, ", ".join(foreign[:3]))
        if isinstance(file, BytesIO):
            file.seek(0)
        try:
            with torch.serialization.safe_globals([(Inert, each) for each in named]):
                return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as error:
            raise _damaged(name, error) from error


@contextmanager
def _nothing_else_allowed() -> Iterator[None]:
    """Other libraries in this process may have allowed PyTorch to make their objects."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(before)


def _refused(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{name} is refused", why=f"it asks for {what}, which is no data; nothing was executed")


def _damaged(name: str, error: Exception) -> CheckpointError:
    lines = str(error).strip().splitlines() or [""]
    return CheckpointError(f"{name} cannot be read", why=f"{type(error).__name__}: {lines[0]}")


class _ForeignError(Exception):
    """The file names an object that is in no table."""


class _Metadata(pickle.Unpickler):
    """Python's interpreter of pickles, with a table instead of imports."""

    def find_class(self, module: str, name: str) -> Any:
        """The replacement of ``module.name``. Raises :class:`_ForeignError` where there is none."""
        full = f"{module}.{name}"
        if full not in _allowed():
            raise _ForeignError(full)
        return _allowed()[full]


@cache
def _allowed() -> Mapping[str, Any]:
    """The names that a ``.metadata`` may have. PyTorch looks layouts up in a table of its own."""
    inert = {f"{module}.{name}": Inert for module, names in _METADATA.items() for name in names}
    types = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    layout = torch.serialization._get_layout  # every file names it
    return {**inert, **types, "torch.Size": torch.Size, "torch.serialization._get_layout": layout}


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
