"""The manifest of a step: what was saved, by which run, and which file holds which box of which logical tensor.

The manifest is written last and ends with its own SHA-256. A step with a valid manifest is therefore complete, and a
single flipped bit is detected. This module needs no torch: neither do the commands that list and verify steps.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from megatron_run.contracts.optimizer import MASTER
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.boxes import Box, cover_fault
from megatron_run_engine.checkpoint.files import read_whole

#: Bytes of one value, by the name of its type in a file.
ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "I64": 8,
        "I32": 4,
        "I16": 2,
        "I8": 1,
        "U8": 1,
        "BOOL": 1,
    }
)
#: The file's name in a step folder.
MANIFEST = "manifest.json"

_HEAD, _JOINT, _END = b'{"manifest":', b',\n"sha256":"', b'"}\n'
_TAIL = re.compile(re.escape(_JOINT) + rb"([0-9a-f]{64})" + re.escape(_END))
_TAIL_LENGTH = len(_JOINT) + 64 + len(_END)
#: The most bytes of a manifest: those of thousands of ranks have some hundred megabytes.
LARGEST = 1 << 30

#: The name of a file next to the manifest. Never a path and never hidden, so that a manifest cannot point elsewhere.
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Xxh3 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
#: What a 64-bit integer holds, with room for a sum.
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Finite = Annotated[float, AllowInfNan(False)]


class Record(BaseModel):
    """A part of the manifest: frozen, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(Record):
    """One shard: its length in bytes, its SHA-256 and its 128-bit XXH3, which steps of version 1 may lack."""

    bytes: Count
    sha256: Sha256
    xxh3: Xxh3 | None = None


class Piece(NamedTuple):
    """A box of a logical tensor, and the file that holds it."""

    file: FileName
    starts: tuple[Count, ...]
    sizes: tuple[Count, ...]

    @property
    def box(self) -> Box:
        """The box of values."""
        return Box(self.starts, self.sizes)


class FieldRecord(Record):
    """One field of a logical tensor (``master``, ``exp_avg``): its type, global shape and pieces."""

    dtype: Literal[tuple(ITEM_BYTES)]  # type: ignore[valid-type]  # the keys of that table
    shape: tuple[Count, ...]
    pieces: tuple[Piece, ...]


class PluginRecord(Record):
    """A plugin of the run, and the version of the state that it saves."""

    name: str
    distribution: str
    version: str
    state_version: int

    @property
    def source(self) -> str:
        """The requirement that installs the plugin again, such as ``megatron-run-optimizer-zero1==0.1.0``."""
        return f"{self.distribution}=={self.version}" if self.distribution else self.name


class DataRecord(Record):
    """The fingerprint of the training data: the number of samples, a SHA-256 over some of them, and the files' XXH3.

    ``files`` is None where there are none, and in older steps. ``listed`` has each file with its own XXH3 while a run
    trains, and is empty in a step: the run folder keeps it, once.
    """

    samples: Count
    sha256: Sha256
    files: Xxh3 | None = None
    listed: tuple[tuple[str, Xxh3], ...] = Field((), exclude=True, repr=False)

    def fits(self, other: DataRecord) -> bool:
        """Whether nothing says that the data of ``other`` are not these."""
        known = self.files is None or other.files is None or self.files == other.files
        return known and (self.samples, self.sha256) == (other.samples, other.sha256)


class TokenizerRecord(Record):
    """The tokenizer of the training data: the path that the configuration names, and the SHA-256 of the file.

    ``files`` has those of the files beside it that say how it is used, by their names. ``end`` is the token that ended
    documents, None where it is unknown.
    """

    name: str
    sha256: Sha256
    files: Mapping[str, Sha256] = {}
    end: Count | None = None


class AdaptersRecord(Record):
    """The addition of a step of adapters to frozen weights (:class:`megatron_run.contracts.Adapters`), and to which.

    ``base`` is the folder of their step and ``sha256`` that of its manifest; both are empty for random weights.
    """

    name: str
    down: str
    up: str
    rank: Count
    scale: float
    base: str
    sha256: Sha256 | Literal[""]
    dropout: float = 0.0


class About(Record):
    """A saved step without its tensors.

    ``counters`` are whole numbers by name (samples consumed, steps skipped). ``losses`` are the losses of the last
    steps, by which spikes are judged. ``scaler`` is the loss scaler's state. ``plugins`` lists the plugins of each kind
    in order. ``versions`` are those of torch, Python and megatron-run. ``topology`` holds the sizes of the parallel
    axes. ``identity`` holds the configuration keys that decide what is learned, and ``config`` their SHA-256.
    ``tokenizer`` is None for data without a tokenizer's file, ``adapters`` for a step that holds all weights.
    ``positions`` is the longest sequence that the model reads, where samples may be shorter: see :attr:`longest`.
    ``programs`` are the files of code that the configuration names. ``source`` is the path that an import read, empty
    for a run.
    """

    step: Count
    run: str
    time: str
    counters: Mapping[str, Count]
    losses: tuple[Finite, ...] = ()
    scaler: Mapping[str, Finite | int]
    data: DataRecord
    plugins: Mapping[str, tuple[PluginRecord, ...]]
    versions: Mapping[str, str]
    topology: Mapping[str, Count]
    config: Sha256
    identity: Mapping[str, Any]
    tokenizer: TokenizerRecord | None = None
    adapters: AdaptersRecord | None = None
    positions: Count | None = None
    programs: Mapping[str, Sha256] = {}
    source: str = ""

    @property
    def longest(self) -> int | None:
        """The longest sequence that the model reads, None where nothing limits it.

        Fine-tuning on shorter samples does not shorten it.
        """
        trained: int | None = self.identity.get("train.sequence_length")
        return trained if self.positions is None else max(self.positions, trained or 0)


class Manifest(Record):
    """A saved step: its ``files`` by name, and the fields of its logical ``tensors`` by tensor and field name.

    Version 1 had no XXH3, and software of its time refuses one: so a step with them is of version 2.
    """

    version: Literal[1, 2] = 2
    about: About
    files: Mapping[FileName, FileRecord]
    tensors: Mapping[str, Mapping[str, FieldRecord]]

    @model_validator(mode="after")
    def _is_complete(self) -> Manifest:
        """Check that hashes are there, that tensors have master weights, and that pieces cover fields exactly once."""
        if unhashed := sorted(name for name, file in self.files.items() if file.xxh3 is None and self.version > 1):
            raise ValueError(f"{unhashed[0]} has no XXH3")
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
        """The size of all shards in bytes."""
        return sum(file.bytes for file in self.files.values())

    def encode(self) -> bytes:
        """Return the content of the file: JSON whose last member is the SHA-256 of the part before it."""
        body = json.dumps(self.model_dump(mode="json"), allow_nan=False).encode()
        return _HEAD + body + _JOINT + hashlib.sha256(body).hexdigest().encode() + _END


_NEWEST: int = Manifest.model_fields["version"].default


def make_manifest(about: About, files: Mapping[str, Any], tensors: Mapping[str, Any]) -> Manifest:
    """Return the manifest of the shards that the ranks report, validated as it will be when it is read.

    Raises :class:`CheckpointError` if the pieces are not the whole state.
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
    """Return the manifest in ``folder``. Raises :class:`CheckpointError` naming the file and the fault."""
    path = folder / MANIFEST
    return decode_manifest(read_whole(path, LARGEST), str(path))


def decode_manifest(content: bytes, path: str) -> Manifest:
    """Return the manifest with this ``content``, from ``path``. Raises :class:`CheckpointError` naming the fault."""
    tail = _TAIL.fullmatch(content, max(0, len(content) - _TAIL_LENGTH))
    if tail is None or not content.startswith(_HEAD):
        raise CheckpointError(f"{path} is damaged", why="it is not a whole manifest")
    body = content[len(_HEAD) : -_TAIL_LENGTH]
    if hashlib.sha256(body).hexdigest().encode() != tail[1]:
        raise CheckpointError(f"{path} is damaged", why="its SHA-256 is not the one that was written")
    try:
        return Manifest.model_validate_json(body)
    except ValidationError as error:
        version = _version_of(body)
        if version > _NEWEST:
            raise CheckpointError(
                f"{path} is of a newer format",
                why=f"its version is {version}, and the newest that this megatron-run reads is {_NEWEST}",
                fix="upgrade megatron-run",
            ) from error
        raise CheckpointError(f"{path} cannot be used", why=_first_fault(error)) from error


def _version_of(body: bytes) -> int:
    """The version in a manifest that may be none: 0 where there is no number."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return 0
    version = content.get("version") if isinstance(content, dict) else None
    return version if isinstance(version, int) else 0


def _first_fault(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    # A damaged manifest may hold control characters: escape them before they reach a terminal.
    place = ".".join(str(part) if str(part).isprintable() else ascii(part) for part in first["loc"])
    text = first["msg"].removeprefix("Value error, ")
    return f"{place}: {text}" if place else text
