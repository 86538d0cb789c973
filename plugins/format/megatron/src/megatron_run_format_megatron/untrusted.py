"""Reading pickles of unknown origin without executing anything.

A pickle is a program that names functions and calls them. Two interpreters are used here, and neither imports what a
file names: PyTorch's for weights only, and Python's with a ``find_class`` that looks names up in a table and nowhere
else. Tensors and dtypes are real. Any other object in the tables becomes an :class:`Inert`, which stores its arguments
and does nothing. A file that names anything else is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.files import reading

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
    """What ``torch.save`` wrote into ``path``: tensors mapped from the file, and plain data around them.

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
    with reading(path) as file:
        try:
            return _Metadata(file).load()
        except _ForeignError as error:
            raise _refused(str(path), str(error)) from None
        except Exception as error:  # a damaged stream can raise anything
            raise _damaged(str(path), error) from error


def _load(file: str | BytesIO, name: str, *, mapped: bool) -> Any:
    with _nothing_else_allowed():
        try:
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
    """What a ``.metadata`` may name. PyTorch looks layouts up in a table of its own."""
    inert = {f"{module}.{name}": Inert for module, names in _METADATA.items() for name in names}
    types = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    layout = torch.serialization._get_layout  # every file names it
    return {**inert, **types, "torch.Size": torch.Size, "torch.serialization._get_layout": layout}
