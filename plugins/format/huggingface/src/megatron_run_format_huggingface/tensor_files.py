"""The safetensors of a Hugging Face folder: one file, or several and an index that says which tensor is where."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.files import FileSystem, reading
from megatron_run_engine.checkpoint.reader import TensorFile
from megatron_run_engine.checkpoint.shard_file import write_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import ReadTensor
    from megatron_run_engine.checkpoint.shard_file import Entry

SINGLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model"
#: Bytes of one file; a larger tensor has a file of its own.
SHARD = 5_000_000_000
#: ``transformers`` refuses a file without it.
_METADATA = {"format": "pt"}


class Tensors:
    """The tensors of the model in ``folder``. Raises :class:`CheckpointError` naming the file at fault."""

    def __init__(self, folder: Path) -> None:
        self._files = {name: TensorFile(folder / name) for name in _file_names(folder)}
        #: Where each tensor lies, by its name.
        self.entries: dict[str, Entry] = {}
        self._file_of: dict[str, TensorFile] = {}
        for name, file in self._files.items():
            if twice := self.entries.keys() & file.entries.keys():
                raise CheckpointError(f"{folder / name} holds {min(twice)}", why="another file of the model does too")
            self.entries |= file.entries
            self._file_of |= dict.fromkeys(file.entries, file)

    def reader(self, name: str) -> ReadTensor:
        """The reader of the tensor ``name``."""
        return partial(self._file_of[name].read, name)


def _file_names(folder: Path) -> list[str]:
    if (folder / SINGLE).exists():
        return [SINGLE]
    if not (folder / INDEX).exists():
        pickled = sorted(path.name for path in folder.glob(f"{PICKLED}*.bin"))
        raise CheckpointError(
            f"{folder} has no {SINGLE}",
            why=f"{pickled[0]} is a pickle, which could execute anything" if pickled else "",
            fix="save the model as safetensors: in transformers, from_pretrained(...).save_pretrained(...)",
        )
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{folder / INDEX} cannot be used", why="it has no weight_map")
    names = sorted({str(name) for name in places.values()})
    for name in names:
        if "/" in name or name.startswith("."):
            raise CheckpointError(f"{folder / INDEX} cannot be used", why=f"{name!r} is not a file beside it")
    return names


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises :class:`CheckpointError`."""
    with reading(path) as file:
        try:
            found = json.loads(file.read())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be used", why=f"it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} cannot be used", why="it is not a JSON object")
    return found


def write_json(path: Path, content: Mapping[str, Any], files: FileSystem) -> None:
    """Write ``content`` to the new file ``path``; it is on the disk when this returns."""
    with files.create(path) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")
        file.sync()


def write_tensor_files(folder: Path, tensors: Iterable[tuple[str, ReadTensor]], files: FileSystem, most: int) -> None:
    """Write ``tensors`` into ``folder``, in files of about ``most`` bytes; each is read when its turn comes."""
    places: dict[str, int] = {}
    total = count = 0
    held: dict[str, Tensor] = {}
    for name, read in tensors:
        tensor = read()
        if held and _size(held.values()) + _size([tensor]) > most:
            total, count, held = total + _flush(folder, count, held, files), count + 1, {}
        held[name], places[name] = tensor, count
    total, count = total + _flush(folder, count, held, files), count + 1
    names = (
        [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)] if count > 1 else [SINGLE]
    )
    for number, name in enumerate(names):
        files.rename(folder / _part(number), folder / name)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {name: names[at] for name, at in places.items()}}
        write_json(folder / INDEX, index, files)


def _flush(folder: Path, number: int, held: Mapping[str, Tensor], files: FileSystem) -> int:
    write_tensors(folder / _part(number), held, files, _METADATA)
    return _size(held.values())


def _part(number: int) -> str:
    """The name of a file until the number of files is known."""
    return f".part-{number}"


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
