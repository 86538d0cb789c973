"""From a Hugging Face folder to ``Weights``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_run.errors import CheckpointError
from megatron_run_engine.formats.gpt import gpt_options, logical_shapes, shapes_fault
from megatron_run_engine.formats.huggingface.families import FAMILIES
from megatron_run_engine.formats.huggingface.family import HEAD
from megatron_run_engine.formats.huggingface.files import INDEX, PICKLED, SINGLE, Tensors, read_json
from megatron_run_engine.formats.weights import Weights

if TYPE_CHECKING:
    from megatron_run_engine.formats.huggingface.family import Config, Family
    from megatron_run_engine.formats.weights import Read

CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
#: Types of values that are weights; others are quantised.
_WEIGHTS = ("F64", "F32", "F16", "BF16")
#: Buffers that old files hold: masks and angles, which follow from the configuration.
_BUFFERS = re.compile(r".*\.attn\.(bias|masked_bias)|.*\.rotary_emb\.inv_freq")


def recognises(source: Path) -> bool:
    """Whether ``source`` has the files of such a folder, pickled weights among them."""
    weights = [source / SINGLE, source / INDEX, *source.glob(f"{PICKLED}*.bin")]
    return (source / CONFIG).is_file() and any(path.is_file() for path in weights)


def read(source: Path) -> Weights:
    """The model in the folder ``source``; headers are read now, values later.

    Raises :class:`CheckpointError` with every reason why it cannot be had here.
    """
    config = read_json(source / CONFIG)
    family = _family(source, config)
    config = {**family.defaults, **config}
    options, longest = _model(source, family, config)
    tensors = Tensors(source)
    weights = Weights(options, {}, sequence_length=longest)
    described = gpt_options(weights)
    shapes, rows = logical_shapes(described, longest), family.rows(described)
    called = _names(tensors, family, tied=described.tie_embeddings)
    found = {name: tensors.entries[full].shape for name, full in called.items()}
    fault = shapes_fault(found, {row.theirs: row.shape(shapes) for row in rows}) or _quantised(tensors, called)
    if fault:
        raise CheckpointError(f"the tensors in {source} are not those of its {CONFIG}", why=fault)
    readers: dict[str, Read] = {}
    for row in rows:
        readers |= row.unpack(tensors.reader(called[row.theirs]), shapes)
    notes = (*family.notes(config), *_tokenizer_note(source))
    return Weights(options, readers, sequence_length=longest, notes=notes)


def _family(source: Path, config: Config) -> Family:
    kind = config.get("model_type")
    if kind not in FAMILIES:
        known = " and ".join(FAMILIES)
        raise CheckpointError(f"{source} holds a model of type {kind!r}", why=f"counterparts are known of {known}")
    return FAMILIES[kind]


def _model(source: Path, family: Family, config: Config) -> tuple[dict[str, object], int]:
    try:
        reasons = family.unfit(config)
        if "quantization_config" in config:
            reasons.append("its weights are quantised")
        if reasons:
            raise CheckpointError(f"{source} cannot be imported", why="; ".join(reasons))
        return family.model(config), int(config[family.positions])
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{source / CONFIG} cannot be used", why=why) from error


def _names(tensors: Tensors, family: Family, *, tied: bool) -> dict[str, str]:
    """The full name of each tensor by its name without prefix; what follows from others is left out."""
    ignored = {HEAD} if tied else set()
    names = [name for name in tensors.entries if name not in ignored and not _BUFFERS.fullmatch(name)]
    return {name.removeprefix(family.prefix): name for name in names}


def _quantised(tensors: Tensors, called: dict[str, str]) -> str:
    kinds = {name: tensors.entries[full].dtype for name, full in called.items()}
    other = next((name for name, dtype in kinds.items() if dtype not in _WEIGHTS), None)
    return f"{other} has values of type {kinds[other]}" if other else ""


def _tokenizer_note(source: Path) -> tuple[str, ...]:
    path = source / _TOKENIZER
    return (f"its tokenizer stays where it is: --set data.tokenizer={path}",) if path.is_file() else ()
