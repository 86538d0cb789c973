"""From ``Weights`` to a folder that ``transformers`` loads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_run.errors import InputError
from megatron_run_engine.checkpoint.files import FileSystem
from megatron_run_engine.formats.gpt import gpt_options, logical_shapes, names_fault, positions
from megatron_run_engine.formats.huggingface.families import FAMILIES
from megatron_run_engine.formats.huggingface.family import HEAD
from megatron_run_engine.formats.huggingface.files import SHARD, write_json, write_tensor_files
from megatron_run_engine.formats.huggingface.importing import CONFIG

if TYPE_CHECKING:
    from megatron_run_engine.builtin.model.gpt import GptOptions
    from megatron_run_engine.formats.huggingface.family import Family
    from megatron_run_engine.formats.weights import Weights


def write(weights: Weights, folder: Path) -> None:
    """Write ``config.json`` and the weights, in fp32, into ``folder``.

    Raises :class:`InputError` with every reason why the model is of none of the families.
    """
    options = gpt_options(weights)
    family = _family(options)
    fault = names_fault(weights.tensors, logical_shapes(options, weights.sequence_length))
    if fault:
        raise InputError("the model has no counterpart at Hugging Face", why=fault)
    rows, files = family.rows(options), FileSystem()
    names = {row.theirs: row.theirs if row.theirs == HEAD else family.prefix + row.theirs for row in rows}
    tensors = ((names[row.theirs], partial(row.pack, weights.tensors)) for row in rows)
    write_tensor_files(folder, tensors, files, SHARD)
    config = {
        "model_type": family.model_type,
        **family.config(options, positions(options, weights.sequence_length)),
        "dtype": "float32",
        "torch_dtype": "float32",  # what older versions call it
        "bos_token_id": None,  # the tokenizer is not ours, and the family's default is another's
        "eos_token_id": None,
    }
    write_json(folder / CONFIG, config, files)
    files.sync_folder(folder)


def _family(options: GptOptions) -> Family:
    mismatches = {name: family.mismatches(options) for name, family in FAMILIES.items()}
    fitting = next((name for name, reasons in mismatches.items() if not reasons), None)
    if fitting is None:
        why = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in mismatches.items())
        raise InputError(
            "the model has no counterpart at Hugging Face", why=f"no {why}", fix="--to distributed writes any model"
        )
    return FAMILIES[fitting]
