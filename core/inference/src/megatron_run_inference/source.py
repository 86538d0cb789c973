"""The model in a folder: a saved step of a run or of an import, or a model in a format of another program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from megatron_run.config.values import nested
from megatron_run.config.yaml import bare, parse
from megatron_run.contracts.optimizer import MASTER
from megatron_run.errors import CheckpointError, DataError, InputError
from megatron_run.files.latest_run import follow_latest
from megatron_run.registry.choose_format import format_to_read
from megatron_run_engine.checkpoint.adapted import MergedReader, open_step
from megatron_run_engine.checkpoint.kept_files import SOURCE, tokenizer_of
from megatron_run_engine.checkpoint.step_folder import find_step
from megatron_run_engine.data.tokenizer_folder.record import AUTO, CHAT_TEMPLATE
from megatron_run_engine.formats.end_tokens import end_tokens, sampling_defaults
from megatron_run_engine.run_folder.folder import last_config

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run_engine.runtime.parameter_init import ReadBox

#: What the model needs of a saved configuration: everything else is decided anew when it is put to use.
_KEPT = ("model", "data")
#: The section of the kind that a run's own layers come from.
_LAYERS = "parallel-layer"


@dataclass(frozen=True)
class Source:
    """A model at rest: ``config`` has the sections that describe it, ``read`` reads any box of its tensors.

    ``path`` is where it lies, ``home`` the folder of its run or import. ``step`` counts the updates that it has seen.
    The section ``data`` is there where a tokenizer is known. ``shapes`` are those of the logical tensors, by name;
    empty where only reading tells. ``ends`` are the tokens at which a text ends, as its program says them; None where
    nothing does, and the tokenizer decides. ``sampling`` is how that program chooses tokens where nothing else is
    asked, by keys of ``Sampling``. ``sample_length`` is that of the samples of a run, which may be shorter than what
    the model reads, and ``data_files`` the hash of the files of its data. ``notes`` are lines for the user: what
    reading it lost. ``lost`` says that its tokenizer is not there, unless the user names one.
    """

    path: Path
    home: Path
    config: Mapping[str, Any]
    step: int
    shapes: Mapping[str, tuple[int, ...]]
    read: ReadBox
    ends: tuple[int, ...] | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    sample_length: int | None = None
    data_files: str | None = None
    notes: tuple[str, ...] = ()
    lost: DataError | None = None

    @property
    def has_samples(self) -> bool:
        """Whether the section ``data`` names samples too, and not only a tokenizer."""
        return bool(self.config.get("data", {}).keys() - {"use", "tokenizer"})

    @property
    def longest(self) -> int | None:
        """The longest sequence that the model reads, as far as is saved."""
        length: int | None = self.config.get("train", {}).get("sequence_length")
        return length


def find_source(
    path: Path | None,
    step: int | None = None,
    *,
    verified: bool = False,
    watch: Callable[[int, int], None] | None = None,
) -> Source:
    """The model at ``path``: a run folder, its checkpoints, one step, an imported folder, or another program's folder.

    None is the latest run; ``step`` is one of its steps, by default that of ``path`` or the newest. Every byte of a
    saved step is compared with its SHA-256 here, unless another process has ``verified`` it; ``watch`` is told how many
    MB are, and of how many. Raises :class:`CheckpointError` where there is no model.
    """
    path = None if path is None else follow_latest(path)
    try:
        checkpoints, chosen = find_step(path, step)
    except CheckpointError:
        if path is None or step is not None or not path.exists() or (path / "run.json").is_file():
            raise
        return _foreign(path)
    manifest = checkpoints.manifest(chosen) if verified else checkpoints.verify(chosen, watch)
    reader = open_step(checkpoints, chosen, manifest, verify=not verified)
    config = nested(manifest.about.identity)
    found: dict[str, Any] = {name: config[name] for name in _KEPT if name in config}
    found["train"] = {} if manifest.about.longest is None else {"sequence_length": manifest.about.longest}
    home, lost = checkpoints.path.parent, None
    layers = _layers(home)
    if layers is not None:
        found[_LAYERS] = layers
    record = manifest.about.tokenizer
    if "data" not in found and record is not None:  # of an import
        found["data"] = _tokenizer(record.name)
    if found.get("data", {}).get("tokenizer"):
        try:
            tokenizer = tokenizer_of(home, manifest.about, str(found["data"]["tokenizer"]))
            found["data"] = {**found["data"], "tokenizer": tokenizer}
            kept = record is not None and CHAT_TEMPLATE in record.files and Path(tokenizer).parent == home
            if "template" in found["data"] and kept:
                found["data"]["template"] = AUTO  # whatever its own file is by now
            end = None if record is None else record.end
            if (
                end is not None and "end_of_document" in found["data"]
            ):  # prepared data records it, in a file that need not be here
                found["data"]["end_of_document"] = end
        except DataError as error:
            lost = error
    return Source(
        path=checkpoints.folder(chosen),
        home=home,
        config=found,
        step=chosen,
        shapes=reader.with_adapters() if isinstance(reader, MergedReader) else reader.shapes(),
        read=lambda name, starts, sizes: reader.read(name, MASTER, starts, sizes),
        ends=end_tokens(home / SOURCE),
        sampling=sampling_defaults(home / SOURCE),
        sample_length=config.get("train", {}).get("sequence_length"),
        data_files=manifest.about.data.files,
        lost=lost,
    )


def _foreign(path: Path) -> Source:
    """The model in ``path``, by whichever format recognises its files."""
    try:
        chosen = format_to_read(path)
    except CheckpointError as unknown:
        why = f"no step is saved there, and its files are in no format that is known: {unknown.why}"
        fix = "name a run folder, one of its saved steps, an imported folder, or a model of another program"
        raise CheckpointError(f"there is no model in {path}", why=why, fix=fix) from unknown
    if chosen.made.executes:
        fix = f"if you trust whoever wrote it, import it: megatron-run import {quote(str(path))} FOLDER --trust-pickle"
        raise CheckpointError(f"{path} is not read", why=chosen.made.executes, fix=fix)
    weights = chosen.read(path)
    if weights.sequence_length is None:
        raise InputError(f"the longest sequence of {path} is unknown", fix="add --set train.sequence_length=N")

    def read(name: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        values: Tensor = weights.tensors[name]()[box]  # kept nowhere: each rank would hold the whole model
        return values

    config = {"model": {"use": "gpt", **weights.config}, "train": {"sequence_length": weights.sequence_length}}
    if weights.tokenizer is not None:
        config["data"] = _tokenizer(str(weights.tokenizer))
    return Source(
        path,
        path,
        config,
        weights.step,
        {},
        read,
        ends=end_tokens(path),
        sampling=sampling_defaults(path),
        notes=weights.notes,
    )


def _tokenizer(name: str) -> dict[str, Any]:
    return {"use": "text", "tokenizer": name}


def _layers(run_folder: Path) -> dict[str, Any] | None:
    """The layers of the run at ``run_folder``, which may compute something of their own; None where nothing tells."""
    config = last_config(run_folder)
    if config is None:
        return None
    node = parse(config.text, str(config.path)).get(_LAYERS)
    section = None if node is None else bare(node)
    return section if isinstance(section, dict) else None
