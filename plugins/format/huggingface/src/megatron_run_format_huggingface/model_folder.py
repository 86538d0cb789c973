"""Reading and writing a folder that ``transformers`` loads: safetensors in one file, or in several with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_run.contracts import ReadTensor, Weights
from megatron_run.contracts.model import MAX_LAYERS
from megatron_run.errors import CheckpointError, InputError
from megatron_run_engine.checkpoint import FileSystem, TensorFile, followed, read_whole, write_tensors
from megatron_run_engine.data import holds_tokenizer
from megatron_run_engine.formats import (
    gpt_options,
    logical_shapes,
    longest_sequence,
    names_fault,
    shapes_fault,
)
from megatron_run_format_huggingface.families import FAMILIES

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import ReadTensor
    from megatron_run_engine.checkpoint import TensorEntry
    from megatron_run_engine.formats import GptOptions, Shape
    from megatron_run_format_huggingface.family import Config, Family, Row


SINGLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model"
#: Bytes of one file; a larger tensor has a file of its own.
SHARD = 5_000_000_000
#: ``transformers`` refuses a file without it.
METADATA = {"format": "pt"}


class Tensors:
    """The tensors of the model in ``folder``. Raises :class:`CheckpointError` naming the file at fault."""

    def __init__(self, folder: Path) -> None:
        #: The files of a cache are links.
        self._files = {name: TensorFile(followed(folder / name)) for name in file_names(folder)}
        #: Where each tensor lies, by its name.
        self.entries: dict[str, TensorEntry] = {}
        self._file_of: dict[str, TensorFile] = {}
        for name, file in self._files.items():
            if twice := self.entries.keys() & file.entries.keys():
                raise CheckpointError(f"{folder / name} holds {min(twice)}", why="another file of the model does too")
            self.entries |= file.entries
            self._file_of |= dict.fromkeys(file.entries, file)

    @property
    def values(self) -> int:
        """How many values all tensors have together."""
        return sum(prod(entry.shape) for entry in self.entries.values())

    def reader(self, name: str) -> ReadTensor:
        """The reader of the tensor ``name``."""
        return partial(self._file_of[name].read, name)


def file_names(folder: Path, there: Collection[str] = ()) -> list[str]:
    """The files of the weights in ``folder``, or of the names ``there`` of files that are still to come.

    Raises :class:`CheckpointError` where there are none, and for an index that names files elsewhere.
    """
    if SINGLE in there or (folder / SINGLE).exists():
        return [SINGLE]
    if not (folder / INDEX).exists():
        pickled = sorted(path.name for path in folder.glob(f"{PICKLED}*.bin"))
        raise CheckpointError(
            f"{folder} has no {SINGLE}",
            why=f"{pickled[0]} is a pickle, which could execute anything" if pickled else "",
            fix="save the model as safetensors: in transformers, from_pretrained(...).save_pretrained(...)",
        )
    places = read_json(followed(folder / INDEX)).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{folder / INDEX} cannot be used", why="it has no weight_map")
    names = sorted({str(name) for name in places.values()})
    for name in names:
        if "/" in name or "\0" in name or name.startswith("."):
            raise CheckpointError(f"{folder / INDEX} cannot be used", why=f"{name!r} is not a file beside it")
    return names


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises :class:`CheckpointError`."""
    content = read_whole(path)
    try:
        found = json.loads(content)
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
    write_tensors(folder / _part(number), held, files, METADATA)
    return _size(held.values())


def _part(number: int) -> str:
    """The name of a file until the number of files is known."""
    return f".part-{number}"


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


CONFIG = "config.json"
#: The file beside it that comes back as it was: every token that ends a text, and how texts are generated.
GENERATION = "generation_config.json"
#: Keys of ``config.json`` that its export takes over from the source.
_TAKEN_OVER = ("bos_token_id", "eos_token_id", "pad_token_id")
_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
#: So many families are named where none fits.
_NEAREST = 3
#: The word embedding in our names, its module, and the key that says whether the output layer has the same weights.
WORD, _WORD_MODULE, _TIED = "embedding.word.weight", "embedding.word", "tie_word_embeddings"
_OWN_HEAD = "{head}.weight differs from the word embedding and is kept, though tie_word_embeddings is true"
#: Types of unquantised weights.
WEIGHTS = ("F64", "F32", "F16", "BF16")
#: Buffers in old files: masks and angles, which follow from the configuration.
_BUFFERS = re.compile(r".*\.attn\.(bias|masked_bias)|.*\.rotary_emb\.inv_freq")


def is_model_folder(source: Path) -> bool:
    """Whether ``source`` has ``config.json`` beside weights, pickled ones included."""
    weights = [source / SINGLE, source / INDEX, *source.glob(f"{PICKLED}*.bin")]
    return (source / CONFIG).is_file() and any(path.is_file() for path in weights)


def read(source: Path) -> Weights:
    """The model in the folder ``source``; headers are read now, values later.

    Raises :class:`CheckpointError` with every reason why it cannot be imported.
    """
    config = read_json(followed(source / CONFIG))
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        kind, known = config.get("model_type"), ", ".join(FAMILIES)
        raise CheckpointError(f"{source} holds a model of type {kind!r}", why=f"only {known} have counterparts here")
    config = {**family.defaults, **config}
    check_layers(source, config)
    options, longest = _model(source, family, config)
    tensors = Tensors(source)
    own_head = bool(config[_TIED]) and _has_other_head(tensors, family)
    if own_head:
        options["tie_embeddings"] = False
    described = gpt_options(Weights(options, {}, sequence_length=longest), family.model)
    most = len(tensors.entries), tensors.values // described.hidden_size
    shapes = logical_shapes(described, longest, *most, family.model)
    rows = family.rows(described, shapes)
    # The output layer of a tied model follows from the word embedding.
    left_out = {f"{family.head}.weight"} if described.tie_embeddings else set()
    names = [name for name in tensors.entries if name not in left_out and not _BUFFERS.fullmatch(name)]
    full_names = {name.removeprefix(family.prefix): name for name in names}
    found = {name: tensors.entries[full].shape for name, full in full_names.items()}
    fault = shapes_fault(found, {row.foreign: row.shape(shapes) for row in rows}) or _quantised(tensors, full_names)
    if fault:
        raise CheckpointError(f"the tensors in {source} do not match its {CONFIG}", why=fault)
    readers: dict[str, ReadTensor] = {}
    for row in rows:
        readers |= row.unpack(tensors.reader(full_names[row.foreign]), shapes)
    return Weights(
        options,
        readers,
        sequence_length=longest,
        notes=(*family.notes(config), *([_OWN_HEAD.format(head=family.head)] if own_head else [])),
        tokenizer=source if holds_tokenizer(source) else None,
        files={name: source / name for name in (CONFIG, GENERATION) if (source / name).is_file()},
    )


class Counterpart(NamedTuple):
    """The ``family`` that can hold a model, its ``rows`` by their names in whole models, and ``shapes`` of ours.

    ``came_as`` is the ``config.json`` with which the model was imported, empty without one.
    """

    family: Family
    options: GptOptions
    rows: Mapping[str, Row]
    shapes: Mapping[str, Shape]
    came_as: Mapping[str, Any]


def counterpart(weights: Weights) -> Counterpart:
    """The model at Hugging Face: of the family that it came as, else of the first that can hold it.

    Raises :class:`InputError` with every reason why none of the families can.
    """
    model, known = str(weights.config.get("use", "gpt")), {family.model for family in FAMILIES.values()}
    if model not in known:
        why = f"the families are of {', '.join(sorted(known))}"
        raise InputError(f"the model is {model}", why=why, fix="--to distributed writes any model")
    options = gpt_options(weights, model)
    came_as = read_json(weights.files[CONFIG]) if CONFIG in weights.files else {}
    family = _family_for(options, model, str(came_as.get("model_type")))
    shapes = logical_shapes(options, weights.sequence_length, model=model)
    if fault := names_fault(weights.tensors, shapes):
        raise InputError("the model has no counterpart at Hugging Face", why=fault)
    head = f"{family.head}.weight"
    rows = {
        row.foreign if row.foreign == head else family.prefix + row.foreign: row for row in family.rows(options, shapes)
    }
    return Counterpart(family, options, rows, shapes, came_as)


def write(weights: Weights, folder: Path) -> None:
    """Write ``config.json`` and the weights into ``folder``, in fp32.

    What was imported and is exported as it was keeps its family, its 16-bit type where no value is rounded, and its
    files. Raises :class:`InputError` with every reason why none of the families can hold the model.
    """
    family, options, rows, _, came_as = counterpart(weights)
    files, half = FileSystem(), str(came_as.get("dtype") or came_as.get("torch_dtype"))
    packing = _Packing(weights.tensors, _HALVES.get(half))
    write_tensor_files(folder, ((name, partial(packing.pack, row)) for name, row in rows.items()), files, SHARD)
    dtype = half if half in _HALVES and not packing.wide else "float32"
    config = {
        "model_type": family.model_type,
        **family.config(options),
        family.positions: longest_sequence(options, weights.sequence_length),
        "dtype": dtype,
        "torch_dtype": dtype,  # the key's name in older versions
        **(special_ids(weights) if not came_as else {key: came_as.get(key) for key in _TAKEN_OVER}),
    }
    write_json(folder / CONFIG, config, files)
    if not came_as and weights.special_tokens:
        write_json(folder / GENERATION, special_ids(weights), files)
    if GENERATION in weights.files:
        write_json(folder / GENERATION, read_json(weights.files[GENERATION]), files)
    files.sync_folder(folder)


def special_ids(weights: Weights) -> dict[str, int | None]:
    """``bos_token_id`` and the like; None where the tokenizer is unknown, since a default belongs to another one."""
    return {key: weights.special_tokens.get(key.removesuffix("_token_id")) for key in _TAKEN_OVER}


class _Packing:
    """Makes their tensors, in the type ``half`` where that rounds nothing; ``wide`` tells whether it would have."""

    def __init__(self, tensors: Mapping[str, ReadTensor], half: torch.dtype | None) -> None:
        self._tensors, self._half, self.wide = tensors, half, False

    def pack(self, row: Row) -> Tensor:
        """The tensor of ``row``."""
        packed = row.pack(self._tensors)
        narrow = packed if self._half is None else packed.to(self._half)
        if torch.equal(narrow.to(packed.dtype), packed):
            return narrow
        self.wide = True
        return packed


def check_layers(source: Path, config: Config) -> None:
    """Raise :class:`CheckpointError` for more layers than can be planned, before anything is listed for each."""
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:
        why = f"num_hidden_layers={layers} is more than the {MAX_LAYERS} layers that can be planned"
        raise CheckpointError(f"{source} cannot be imported", why=why)


def _model(source: Path, family: Family, config: Config) -> tuple[dict[str, object], int]:
    """The ``model`` section and the longest sequence. Raises :class:`CheckpointError`."""
    try:
        reasons = family.unsupported(config)
        if config.get("quantization_config") is not None:
            reasons.append("its weights are quantised")
        if reasons:
            raise CheckpointError(f"{source} cannot be imported", why="; ".join(reasons))
        return family.options(config), int(config[family.positions])
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{source / CONFIG} cannot be used", why=why) from error


def _quantised(tensors: Tensors, full_names: dict[str, str]) -> str:
    kinds = {name: tensors.entries[full].dtype for name, full in full_names.items()}
    other = next((name for name, dtype in kinds.items() if dtype not in WEIGHTS), None)
    return f"{other} has values of type {kinds[other]}" if other else ""


def _has_other_head(tensors: Tensors, family: Family) -> bool:
    """Whether the files hold an output layer that is not the word embedding, which transformers then keeps apart."""
    embedding = next(foreign for foreign, module in family.tensors.items() if module == _WORD_MODULE)
    head = f"{family.head}.weight"
    full = next((name for name in tensors.entries if name.removeprefix(family.prefix) == f"{embedding}.weight"), None)
    if full is None or head not in tensors.entries:
        return False
    return not torch.equal(tensors.reader(head)(), tensors.reader(full)())


def _family_for(options: GptOptions, model: str, first: str = "") -> Family:
    """The family of ``model`` called ``first`` if it fits, else the first that does.

    Raises :class:`InputError` with what the nearest ones differ in.
    """
    families = {name: family for name, family in FAMILIES.items() if family.model == model}
    if first in families and not families[first].mismatches(options):
        return families[first]
    mismatches = {name: family.mismatches(options) for name, family in families.items()}
    fitting = next((name for name, reasons in mismatches.items() if not reasons), None)
    if fitting is None:
        nearest = sorted(mismatches, key=lambda name: len(mismatches[name]))[:_NEAREST]
        why = "; ".join(f"{name}: {', '.join(mismatches[name])}" for name in nearest)
        raise InputError(
            "the model has no counterpart at Hugging Face",
            why=f"no {why}",
            fix="--to distributed writes any model",
        )
    return families[fitting]
