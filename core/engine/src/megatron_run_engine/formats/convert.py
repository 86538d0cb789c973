"""The two ways: a model of another program becomes a new folder of ours; a saved step of ours becomes one of theirs.

A saved step is read as ``Weights``; ``Weights`` are written as a folder of one saved step.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_run import __version__
from megatron_run.config.run_home import IMPORT_HEAD
from megatron_run.config.values import flat, nested
from megatron_run.config.yaml import yaml_text
from megatron_run.contracts.format import ADAPTERS, ReadTensor, Weights
from megatron_run.contracts.optimizer import MASTER, StatePiece
from megatron_run.errors import CheckpointError, InputError, taken
from megatron_run.files.publishing import publishing_folder
from megatron_run.registry.choose_format import format_to_read, format_to_write
from megatron_run.registry.discover import plain_name
from megatron_run.registry.fetching import local_folder
from megatron_run_engine.checkpoint.adapted import MergedReader, open_step, record_of
from megatron_run_engine.checkpoint.files import FileSystem, followed, lock, read_whole, saving
from megatron_run_engine.checkpoint.kept_files import SOURCE, TokenizerFiles, exported_tokenizer, source_files
from megatron_run_engine.checkpoint.manifest import About, DataRecord, make_manifest
from megatron_run_engine.checkpoint.saving import LOCK, Commit
from megatron_run_engine.checkpoint.shard_file import NAMES, write_shard, written_type
from megatron_run_engine.checkpoint.step_folder import CHECKPOINTS, IMPORTED, Checkpoints, find_step
from megatron_run_engine.formats.adapters import check_adapters, find_adapted, saved_adapters
from megatron_run_engine.formats.exported_files import files_beside, given_tokenizer, special_tokens
from megatron_run_engine.formats.gpt_tensors import Shape, gpt_options, logical_shapes, names_fault
from megatron_run_engine.formats.import_notes import not_finite, too_many_ids
from megatron_run_engine.formats.model_card import model_card
from megatron_run_engine.run_folder.changes import digest

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.registry.choose_format import ChosenFormat
    from megatron_run_engine.checkpoint.manifest import AdaptersRecord, Manifest
    from megatron_run_engine.checkpoint.reader import Reader


@dataclass(frozen=True)
class Imported:
    """An import: the ``format`` of the source, the number of weights, the moments, notes for the user."""

    folder: str
    format: str
    step: int
    parameters: int
    moments: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Exported:
    """An export: a ``step`` of the run at ``source``; and where it can be seen, if it was ``pushed``."""

    source: str
    step: int
    folder: str
    format: str
    pushed: str = ""


def import_model(
    source: Path, folder: Path, name: str | None = None, *, trust_pickle: bool = False, base: Path | None = None
) -> Imported:
    """Write the model at ``source`` as the new ``folder``. Its format is ``name``, else recognised from its files.

    ``source`` is a path, or the name of a model elsewhere (:mod:`megatron_run.registry.fetching`).

    ``name`` is that of an installed format, DIST:NAME, or a plugin file. A format that executes what it reads needs
    ``trust_pickle``. Adapters are written as a step that names the one that they adapt: that of the run or import
    ``base``, by default of the folder that they name. Raises a RunError, and then leaves nothing behind.
    """
    source, base = local_folder(source), None if base is None else local_folder(base)
    chosen = format_to_read(source, name, adapters=True)
    if chosen.made.executes and not trust_pickle:
        raise CheckpointError(
            f"{source} is not read", why=chosen.made.executes, fix="if you trust whoever wrote it: --trust-pickle"
        )
    if ADAPTERS in chosen.plugin.provides:
        weights, record = _read_adapters(chosen, source, base)
    elif base is not None:
        raise InputError(f"{source} holds a whole model", why="only adapters have a base", fix="leave out --base")
    else:
        weights, record = chosen.read(source), None
    bad, path = Counter[str](), str(source.absolute())
    manifest = write_folder(weights, folder, f"{source} ({chosen.name})", bad, origin=path, adapters=record)
    moments = tuple(sorted(field for field, readers in weights.moments.items() if readers))
    notes = (*weights.notes, *not_finite(bad), *too_many_ids(weights))
    return Imported(str(folder), chosen.name, weights.step, count_values(manifest), moments, notes)


def _read_adapters(chosen: ChosenFormat, source: Path, base: Path | None) -> tuple[Weights, AdaptersRecord]:
    """The adapters at ``source`` in the place of the weights of their model, and what a step says of them.

    Raises a RunError where that model is not here, or is another one.
    """
    found = chosen.read_adapters(source)
    checkpoints, step = find_adapted(source, found.base, base)
    model = read_step(checkpoints, step)
    adapters = found.upon(model)
    check_adapters(adapters, open_step(checkpoints, step, checkpoints.manifest(step), verify=False).shapes(), source)
    under = checkpoints.folder(step)
    note = f"they adapt the weights in {under}, which must stay"
    weights = replace(model, tensors=adapters.tensors, step=0, moments={}, adapters=None, notes=(note,))
    return weights, record_of(adapters.how, under)


def export_model(
    source: Path | None, folder: Path, name: str, step: int | None = None, push: str | None = None
) -> Exported:
    """Write a saved step in the format ``name`` as the new ``folder``, which appears when it is whole.

    ``source`` is a run folder, its checkpoints or one step; None is the latest run. ``step`` is one of its steps; None
    is the newest. The folder is then sent to the place ``push``, with a model card, where the format knows such places.
    Raises a RunError, and then leaves nothing behind, but the whole folder where only sending it fails.
    """
    target, files = format_to_write(name), FileSystem()
    publisher = None if push is None else target.publisher(push)
    checkpoints, chosen = find_step(source, step)
    with new_folder(folder) as temporary:
        with checkpoints.offering_older(chosen, lambda older: f"to export step {older}: --step {older}"):
            weights = read_step(checkpoints, chosen)
        target.write(weights, temporary)
        # The tokenizer of adapters is their model's.
        beside_it = () if ADAPTERS in target.plugin.provides else files_beside(weights, checkpoints, chosen)
        for beside, content in beside_it:
            if not (temporary / beside).exists():  # what was imported with the model has been written
                _write_file(temporary / beside, content, files)
        if publisher is not None:
            card = model_card(checkpoints, chosen, count_values(checkpoints.manifest(chosen)))
            _write_file(temporary / README, target.readme(publisher, card).encode(), files)
    pushed = "" if publisher is None else target.send(publisher, folder)
    return Exported(str(checkpoints.path), chosen, str(folder), target.name, pushed)


#: The model card's name in a folder that is sent.
README = "README.md"
#: The configuration's name in an imported folder, as in a run folder.
CONFIG = "config.yaml"
#: Bytes of one file, and the most that an import holds where readers give no views of files. A larger tensor has a file
#: of its own.
PART = 2 << 30
#: Types of weights: the narrower ones become fp32 masters as they are written.
_MASTERS = (torch.float32, torch.bfloat16, torch.float16)
#: Values that are looked through at once.
_BLOCK = 1 << 20
_WORD = "embedding.word.weight"


def read_step(checkpoints: Checkpoints, step: int) -> Weights:
    """A saved step. Every byte is compared with its SHA-256 first. Raises :class:`CheckpointError`."""
    manifest = checkpoints.verify(step)
    reader, identity = open_step(checkpoints, step, manifest), manifest.about.identity
    config = nested(identity).get("model", {})
    config["use"] = plain_name(str(config.get("use", "")))
    if config.get("vocab_size") is None and _WORD in reader.shapes():
        config["vocab_size"] = reader.shapes()[_WORD][0]
    adapters = saved_adapters(reader) if isinstance(reader, MergedReader) else None
    if isinstance(reader, MergedReader):
        readers = {MASTER: {name: _whole(reader, name, MASTER, shape) for name, shape in reader.shapes().items()}}
    else:
        fields = {field for record in manifest.tensors.values() for field in record}
        readers = {field: _readers(manifest, reader, field) for field in sorted(fields)}
    home = checkpoints.path.parent
    return Weights(
        config=config,
        tensors=readers.pop(MASTER),
        step=step,
        sequence_length=manifest.about.longest,
        moments=readers,
        tokenizer=exported_tokenizer(home, manifest.about),
        special_tokens=special_tokens(checkpoints, manifest),
        files=source_files(home),
        adapters=adapters,
    )


def _readers(manifest: Manifest, reader: Reader, field: str) -> dict[str, ReadTensor]:
    shapes = {name: record[field].shape for name, record in manifest.tensors.items() if field in record}
    return {name: _whole(reader, name, field, shape) for name, shape in shapes.items()}


def _whole(reader: Reader | MergedReader, name: str, field: str, shape: tuple[int, ...]) -> ReadTensor:
    return partial(reader.read, name, field, (0,) * len(shape), shape)


def write_folder(
    weights: Weights,
    folder: Path,
    source: str,
    bad: Counter[str] | None = None,
    *,
    origin: str = "",
    adapters: AdaptersRecord | None = None,
) -> Manifest:
    """Write ``weights`` as the new ``folder``: ``config.yaml`` and ``checkpoints/step<N>``, committed as a run's steps.

    ``source`` enters ``config.yaml`` as a comment, its path ``origin`` the step. ``bad`` is filled with the number of
    values that are not finite, by tensor. With ``adapters`` the tensors are those alone, and have been checked. Raises
    :class:`InputError` when the folder exists, :class:`CheckpointError` when the tensors are not those of the model or
    the disk fails. Then nothing is left behind.
    """
    identity = _identity(weights)
    shapes = {} if adapters else _shapes(weights)
    _check_names(weights, shapes)
    files, kept = FileSystem(), given_tokenizer(weights)
    with new_folder(folder) as temporary:
        _write_file(temporary / CONFIG, _config_text(weights, source, folder, kept).encode(), files)
        for name, content in {} if kept is None else kept.contents.items():
            _write_file(temporary / name, content, files)
        if weights.files:
            files.make_folder(temporary / SOURCE)
        for name, path in weights.files.items():
            _write_file(temporary / SOURCE / name, _given(path), files)
        bad = Counter[str]() if bad is None else bad
        about = _about(weights, identity, kept).model_copy(update={"source": origin, "adapters": adapters})
        return _write_step(_parts(weights, shapes, bad), Checkpoints(temporary / CHECKPOINTS), about, files)


def _given(path: Path) -> bytes:
    """A file of the source that travels along. Raises :class:`CheckpointError` for one from elsewhere or too large."""
    return read_whole(followed(path))


def _write_file(path: Path, content: bytes, files: FileSystem) -> None:
    with files.create(path) as file:
        file.write(content)
        file.sync()


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to be filled, which becomes the new ``folder`` when it is whole.

    Raises :class:`InputError` when the name is taken, :class:`CheckpointError` when the disk fails.
    """
    try:
        with saving(f"{folder} could not be written"), publishing_folder(folder) as hidden:
            yield hidden
    except CheckpointError as error:
        if isinstance(error.__cause__, FileExistsError) and error.__cause__.filename == str(folder):
            raise taken(folder) from error
        raise


def _write_step(
    parts: Iterable[list[StatePiece]], checkpoints: Checkpoints, about: About, files: FileSystem
) -> Manifest:
    commit = Commit(checkpoints, IMPORTED, files)
    commit.make_home()
    with lock(checkpoints.path / LOCK, IMPORTED):
        temporary = commit.begin(about.step)
        written: dict[str, dict[str, Any]] = {}
        tensors: dict[str, dict[str, Any]] = {}
        for number, pieces in enumerate(parts):
            name = f"part-{number:05d}.safetensors"
            written[name] = write_shard(temporary / name, pieces, files, widen=True)._asdict()
            for piece in pieces:
                dtype = written_type(piece.tensor, widen=True)
                record: dict[str, Any] = {"dtype": NAMES[dtype], "shape": piece.sizes}
                record["pieces"] = [(name, piece.starts, piece.sizes)]
                tensors.setdefault(piece.name, {})[piece.field] = record
        manifest = make_manifest(about, written, tensors)
        commit.finish(manifest)
    return manifest


def _parts(weights: Weights, shapes: Mapping[str, Shape], bad: Counter[str]) -> Iterator[list[StatePiece]]:
    """All fields of all tensors in lists of about :data:`PART` bytes, each tensor read when its turn comes.

    A list is cleared before the next one is filled, so that its tensors are freed.
    ``bad`` is filled with the number of values that are not finite, by tensor.
    """
    held, size = list[StatePiece](), 0
    for name, field, read in _everything(weights):
        tensor = read()
        if field == MASTER:
            _check_values(name, tensor, shapes)
            blocks = tensor.reshape(-1).split(_BLOCK)
            if wrong := tensor.numel() - sum(int(torch.isfinite(block).sum()) for block in blocks):
                bad[name] += wrong
        bytes_ = tensor.numel() * written_type(tensor, widen=True).itemsize
        if held and size + bytes_ > PART:
            yield held
            held.clear()
            size = 0
        held.append(StatePiece(name, field, (0,) * tensor.ndim, tuple(tensor.shape), tensor))
        size += bytes_
    yield held


def _everything(weights: Weights) -> Iterator[tuple[str, str, ReadTensor]]:
    for name, read in weights.tensors.items():
        yield name, MASTER, read
        for field, readers in weights.moments.items():
            if name in readers:
                yield name, field, readers[name]


def _check_values(name: str, tensor: Tensor, shapes: Mapping[str, Shape]) -> None:
    if tensor.dtype not in _MASTERS:
        raise CheckpointError(f"{name} has values of type {tensor.dtype}", why="masters are fp32, bf16 or fp16")
    if name in shapes and tuple(tensor.shape) != shapes[name]:
        raise CheckpointError(
            f"{name} does not fit the model", why=f"its shape is {list(tensor.shape)}, expected {list(shapes[name])}"
        )


def _shapes(weights: Weights) -> dict[str, Shape]:
    """The shape of every tensor of a model ``gpt``; empty for another model, whose shapes only its plugin knows."""
    if weights.config.get("use", "gpt") != "gpt":
        return {}
    most = len(weights.tensors)  # every layer and every expert has some of its own
    return logical_shapes(gpt_options(weights), weights.sequence_length, most, most)


def _check_names(weights: Weights, shapes: Mapping[str, Shape]) -> None:
    fault = names_fault(weights.tensors, shapes) if shapes else ""
    if fault:
        raise CheckpointError("the source does not hold one whole model", why=fault)


def _sections(weights: Weights) -> dict[str, dict[str, Any]]:
    """The sections of the configuration that the source determines, with every option of a model ``gpt``."""
    model: dict[str, Any] = {"use": "gpt", **weights.config}
    if model["use"] == "gpt":
        model |= gpt_options(weights).model_dump(mode="json")
    known = {"model": model}
    return known if weights.sequence_length is None else known | {"train": {"sequence_length": weights.sequence_length}}


def _identity(weights: Weights) -> dict[str, Any]:
    return flat(_sections(weights))


def _config_text(weights: Weights, source: str, folder: Path, kept: TokenizerFiles | None) -> str:
    """``config.yaml``, which names the weights. Options that the source does not determine are left out."""
    sections = {"run": {"init_from": str(folder.absolute())}, **_sections(weights)}
    if kept is not None:
        sections["data"] = {"use": "text", "tokenizer": str(folder.absolute() / kept.name)}
    given = {"use", *flat(weights.config)}
    sections["model"] = nested({key: value for key, value in flat(sections["model"]).items() if key in given})
    return f"{IMPORT_HEAD}{source.splitlines()[0]}\n{yaml_text({'version': 1, **sections})}"


def _about(weights: Weights, identity: Mapping[str, Any], kept: TokenizerFiles | None) -> About:
    return About(
        step=weights.step,
        run=IMPORTED,
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        counters={"step": weights.step},
        scaler={},
        data=DataRecord(samples=0, sha256="0" * 64),  # no data is known
        plugins={},
        versions={"megatron-run": __version__, "torch": torch.__version__, "python": platform.python_version()},
        topology={"world": 1},
        config=digest(identity),
        identity=identity,
        tokenizer=None if kept is None else kept.record,
    )


def count_values(manifest: Manifest) -> int:
    """How many weights the step has."""
    return sum(prod(fields[MASTER].shape) for fields in manifest.tensors.values())
