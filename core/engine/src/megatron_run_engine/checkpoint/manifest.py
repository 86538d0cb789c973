"""The manifest of a step: what was saved, by whom, and which file holds which box of which logical tensor.

It is written last and carries its own SHA-256, so that a step with a valid manifest is a committed one, and a single
flipped bit is found.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from megatron_run.contracts.state import MASTER
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.boxes import Box, cover_fault
from megatron_run_engine.checkpoint.files import reading
from megatron_run_engine.checkpoint.shard_file import ITEM_BYTES

#: The file's name in a step folder.
MANIFEST = "manifest.json"

_HEAD, _JOINT, _END = b'{"manifest":', b',\n"sha256":"', b'"}\n'
_TAIL = re.compile(re.escape(_JOINT) + rb"([0-9a-f]{64})" + re.escape(_END))
_TAIL_LENGTH = len(_JOINT) + 64 + len(_END)

_UNITS = ("B", "kB", "MB", "GB", "TB")

#: A file beside the manifest: never a path, never hidden.
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


class Record(BaseModel):
    """A part of the manifest: frozen, and nothing in it that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(Record):
    """One shard: its length in bytes and its SHA-256."""

    bytes: Count
    sha256: Sha256


class Piece(NamedTuple):
    """A box of a logical tensor and the file that holds it."""

    file: FileName
    starts: tuple[Count, ...]
    sizes: tuple[Count, ...]

    @property
    def box(self) -> Box:
        """Which values."""
        return Box(self.starts, self.sizes)


class FieldRecord(Record):
    """One field of a logical tensor (``master``, ``exp_avg``): type, global shape, and the pieces that make it up."""

    dtype: Literal[tuple(ITEM_BYTES)]  # type: ignore[valid-type]  # the keys of that table
    shape: tuple[Count, ...]
    pieces: tuple[Piece, ...]


class PluginRecord(Record):
    """A plugin that the run was made of, and the version of what it saves."""

    name: str
    distribution: str
    version: str
    state_version: int

    @property
    def source(self) -> str:
        """``megatron-run-optimizer-zero1==0.1.0``: what to install to have it again."""
        return f"{self.distribution}=={self.version}" if self.distribution else self.name


class DataRecord(Record):
    """What tells the training samples from others: how many there are, and a SHA-256 over some of them."""

    samples: Count
    sha256: Sha256


class About(Record):
    """Everything about a saved step but its tensors.

    ``counters`` are whole numbers by name (samples consumed, steps skipped); ``losses`` those of the last steps, with
    which a spike is compared; ``scaler`` is the loss scaler's state;
    ``plugins`` are those of each kind, in their order; ``versions`` of torch, Python and the kernel; ``topology`` the
    sizes of the parallel axes; ``identity`` the keys of the configuration that decide what is learned, and ``config``
    the SHA-256 of them.
    """

    step: Count
    run: str
    time: str
    counters: Mapping[str, int]
    losses: tuple[float, ...] = ()
    scaler: Mapping[str, float | int]
    data: DataRecord
    plugins: Mapping[str, tuple[PluginRecord, ...]]
    versions: Mapping[str, str]
    topology: Mapping[str, int]
    config: Sha256
    identity: Mapping[str, Any]


class Manifest(Record):
    """A saved step. ``files`` by name; ``tensors`` maps the name of a logical tensor to its fields by name."""

    version: Literal[1] = 1
    about: About
    files: Mapping[FileName, FileRecord]
    tensors: Mapping[str, Mapping[str, FieldRecord]]

    @model_validator(mode="after")
    def _is_complete(self) -> Manifest:
        """Every logical tensor has its weights, and the pieces of each field cover it exactly once."""
        for name, fields in self.tensors.items():
            if MASTER not in fields:
                raise ValueError(f"{name} has no field {MASTER}")
            for field, record in fields.items():
                foreign = {piece.file for piece in record.pieces} - self.files.keys()
                fault = f"its piece in {min(foreign)} is in no file of the step" if foreign else ""
                fault = fault or cover_fault(record.shape, [piece.box for piece in record.pieces])
                if fault:
                    raise ValueError(f"{field} of {name}: {fault}")
        return self

    @property
    def size(self) -> int:
        """Length of all shards together, in bytes."""
        return sum(file.bytes for file in self.files.values())

    def encode(self) -> bytes:
        """The content of the file: JSON, in it the SHA-256 of all that stands before."""
        body = json.dumps(self.model_dump(mode="json"), allow_nan=False).encode()
        return _HEAD + body + _JOINT + hashlib.sha256(body).hexdigest().encode() + _END


def make_manifest(about: About, files: Mapping[str, Any], tensors: Mapping[str, Any]) -> Manifest:
    """The manifest of what the ranks say they saved, as it will be read again.

    Raises :class:`CheckpointError` when it is not the whole state.
    """
    content = {"about": about.model_dump(mode="json"), "files": files, "tensors": tensors}
    try:
        return Manifest.model_validate_json(json.dumps(content, allow_nan=False))
    except ValidationError as error:
        raise CheckpointError(
            f"step {about.step} could not be saved: its pieces are not the whole state",
            why=_first_fault(error),
            origin="the optimizer's iter_state",
        ) from error


def read_manifest(folder: Path) -> Manifest:
    """The manifest in ``folder``. Raises :class:`CheckpointError` naming the file and what is wrong with it."""
    path = folder / MANIFEST
    with reading(path) as file:
        content = file.read()
    tail = _TAIL.fullmatch(content, max(0, len(content) - _TAIL_LENGTH))
    if tail is None or not content.startswith(_HEAD):
        raise CheckpointError(f"{path} is damaged", why="it is not a whole manifest")
    body = content[len(_HEAD) : -_TAIL_LENGTH]
    if hashlib.sha256(body).hexdigest().encode() != tail[1]:
        raise CheckpointError(f"{path} is damaged", why="its SHA-256 is not the one that was written")
    try:
        return Manifest.model_validate_json(body)
    except ValidationError as error:
        raise CheckpointError(f"{path} cannot be used", why=_first_fault(error)) from error


def _first_fault(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) if str(part).isprintable() else ascii(part) for part in first["loc"])
    text = first["msg"].removeprefix("Value error, ")
    return f"{place}: {text}" if place else text


def size_text(size: int) -> str:
    """``950 B``, ``12.3 MB``."""
    amount, unit = float(size), 0
    while amount >= 1000 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{size} B"
