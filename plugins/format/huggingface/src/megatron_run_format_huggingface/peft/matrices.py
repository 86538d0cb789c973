"""The tensors of adapters: ``base_model.model.<module>.lora_A.weight`` [r, i] and ``lora_B.weight`` [o, r].

What is one matrix there and several here, as query, key and value of GPT-2 or Phi-3, has one A there, and one here for
each part. Where ours differ, theirs has the rows of all, and B a block for each part, zeros elsewhere: the same sums,
of a greater rank (``rank_pattern``). Read again, a column of B that is zero in one part and not in another is left out.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_run.contracts import Adapters, AdapterWeights
from megatron_run.errors import CheckpointError, InputError
from megatron_run_engine.checkpoint import TensorFile, followed
from megatron_run_engine.formats import first_few
from megatron_run_format_huggingface import bert, model_folder
from megatron_run_format_huggingface.family import at_most_fp32
from megatron_run_format_huggingface.peft.config import Written

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from megatron_run.contracts import ReadTensor, Weights
    from megatron_run_engine.formats import Shape
    from megatron_run_format_huggingface.family import Row
    from megatron_run_format_huggingface.peft.config import AdapterConfig

#: The file's name; and that of a pickle, which is refused.
FILE, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
_WEIGHT, _EXPERT = ".weight", ".experts."
#: The factory that makes adapters of this form, and its names of A and B; a saved step tells its readers the names.
_HOW = ("lora", "lora_a", "lora_b")


def write(weights: Weights, adapters: AdapterWeights) -> Written:
    """Their tensors of ``adapters``. Raises :class:`InputError` where the model has no counterpart."""
    rows, shapes, _ = _tables(weights)
    end = f".{adapters.how.up}{_WEIGHT}"
    left = {name.removesuffix(end) for name in adapters.tensors if name.endswith(end)}
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    transposed = False
    for module, row in rows.items():
        stems = [name.removesuffix(_WEIGHT) for name in row.logical]
        found = {stem: _pair(adapters, stem) for stem in stems if stem in left}
        if not found:
            continue
        left -= found.keys()
        down, ups = _stacked(found)
        zeros = {stem: torch.zeros(shapes[stem + _WEIGHT][0], down.shape[0]) for stem in stems if stem not in found}
        blocks = {stem + _WEIGHT: partial(_same, block) for stem, block in {**ups, **zeros}.items()}
        tensors[_name(module, "A")], tensors[_name(module, "B")] = down, _upright(row).pack(blocks)
        ranks[module], transposed = down.shape[0], transposed or row.transposed
    if left:
        raise InputError("adapters of these have no counterpart at Hugging Face", why=first_few(sorted(left)))
    if taken := _taken_for_experts(ranks, rows):
        raise InputError(
            "peft would load these adapters as those of all experts, by the last word of their names",
            why=first_few(taken),
            fix="--to huggingface writes the merged model; parallel-layer.targets can leave them out",
        )
    return Written(tensors, ranks, list(rows), transposed)


def _taken_for_experts(modules: Iterable[str], every: Iterable[str]) -> list[str]:
    """Modules whose last word is that of an expert's: with transformers 5, peft gives their adapters to all experts."""
    words = {name.rpartition(".")[2] for name in every if _EXPERT in name}
    return [name for name in modules if name.rpartition(".")[2] in words]


def _tables(weights: Weights) -> tuple[dict[str, Row], Mapping[str, Shape], str]:
    """The rows of the model's matrices by their modules' names, the shapes of ours, and the prefix of a whole model."""
    if weights.config.get("use") == "bert":
        _, _, rows, shapes = bert.counterpart(weights)
        prefix = ""
    else:
        family, _, rows, shapes, _ = model_folder.counterpart(weights)
        prefix = family.prefix
    found = {name.removesuffix(_WEIGHT): row for name, row in rows.items() if name.endswith(_WEIGHT)}
    matrices = {name: row for name, row in found.items() if len(row.shape(shapes)) > 1}
    return matrices, shapes, prefix


def _pair(adapters: AdapterWeights, stem: str) -> tuple[Tensor, Tensor]:
    down, up = (adapters.tensors[f"{stem}.{end}{_WEIGHT}"]() for end in (adapters.how.down, adapters.how.up))
    return down, up


def _stacked(found: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """One A for all parts, and the B of each for it. Parts with the same A share its rows."""
    downs: list[Tensor] = []
    for down, _ in found.values():
        if not any(torch.equal(down, other) for other in downs):
            downs.append(down)
    starts = [sum(each.shape[0] for each in downs[:number]) for number in range(len(downs))]
    rank = sum(each.shape[0] for each in downs)
    ups = {}
    for stem, (down, up) in found.items():
        start = next(at for at, other in zip(starts, downs, strict=True) if torch.equal(down, other))
        ups[stem] = torch.zeros(up.shape[0], rank)
        ups[stem][:, start : start + up.shape[1]] = up
    return torch.cat(downs), ups


def _upright(row: Row) -> Row:
    """``row`` as it lies in B, whatever lies in their matrix."""
    return row._replace(transposed=False)


def _same(value: Tensor) -> Tensor:
    return value


def open_file(source: Path) -> TensorFile:
    """The file of adapters in ``source``. Raises :class:`CheckpointError` for none, a pickle or a broken one."""
    if not (source / FILE).exists():
        pickled = (source / PICKLED).exists()
        raise CheckpointError(
            f"{source} has no {FILE}",
            why=f"{PICKLED} is a pickle, which could execute anything" if pickled else "",
            fix="save the adapters as safetensors: in peft, PeftModel.from_pretrained(...).save_pretrained(...)",
        )
    return TensorFile(followed(source / FILE))


def read(file: TensorFile, described: AdapterConfig, weights: Weights) -> AdapterWeights:
    """The adapters in ``file`` by our names, for the model of ``weights``; those of one scale, others as B times more.

    Raises :class:`CheckpointError` with the tensors that are not of that model.
    """
    rows, shapes, prefix = _tables(weights)
    short = {name.removeprefix(prefix): row for name, row in rows.items()}
    modules = dict.fromkeys(match[1] for match in map(_NAME.fullmatch, file.entries) if match)
    faults = [_foreign(name) for name in file.entries if not _NAME.fullmatch(name)]
    tensors: dict[str, ReadTensor] = {}
    how = Adapters(*_HOW, described.rank, described.scale, float(described.dropout))
    for module in modules:
        row = short.get(module.removeprefix(prefix))
        if row is None:
            faults.append(f"{module} is no matrix of the model")
        elif fault := _misfit(file, module, row, shapes, described.rank_of(module)):
            faults.append(fault)
        else:
            factor = described.scale_of(module) / described.scale
            tensors |= dict(_imported(file, module, _upright(row), shapes, factor))
    if faults:
        raise CheckpointError(f"{file.path} does not fit the model", why=first_few(faults))
    return AdapterWeights(how, tensors, described.base)


def _foreign(name: str) -> str:
    if ".lora_" in name:
        return f"{name} is none of a low-rank adapter of a matrix"
    return f"{name} has whole weights (save_pretrained(..., save_embedding_layers=False) leaves out frozen ones)"


def _misfit(file: TensorFile, module: str, row: Row, shapes: Mapping[str, Shape], rank: int) -> str:
    """The fault of the shapes of A and B of ``module``; empty where nothing is."""
    outputs, inputs = _upright(row).shape(shapes)
    for end, wanted in (("A", (rank, inputs)), ("B", (outputs, rank))):
        entry = file.entries.get(_name(module, end))
        if entry is None:
            return f"{module} lacks lora_{end}"
        if entry.shape != wanted:
            return f"lora_{end} of {module} is {list(entry.shape)}, and {list(wanted)} here"
        if entry.dtype not in model_folder.WEIGHTS:
            return f"lora_{end} of {module} has values of type {entry.dtype}"
    return ""


def _name(module: str, end: str) -> str:
    return f"base_model.model.{module}.lora_{end}.weight"


def _imported(
    file: TensorFile, module: str, row: Row, shapes: Mapping[str, Shape], factor: float
) -> Iterator[tuple[str, ReadTensor]]:
    """Our A and B of ``row``, the second times ``factor``, where its A and B are those of ``module``."""
    down, up = (partial(_read, file, _name(module, end), by) for end, by in (("A", 1.0), ("B", factor)))
    parts = dict(row.unpack(up, shapes))
    columns: dict[str, Any] = dict.fromkeys(parts)
    if len(parts) > 1:
        columns = _used({name: read() for name, read in parts.items()})
    for name, kept in columns.items():
        ends = [f"{name.removesuffix(_WEIGHT)}.{end}.weight" for end in _HOW[1:]]
        yield ends[0], down if kept is None else partial(_chosen, down, 0, kept)
        yield ends[1], parts[name] if kept is None else partial(_chosen, parts[name], 1, kept)


def _used(ups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columns of the B of each part that are not zero; all where those of all parts are zero."""
    used = {name: (up != 0).any(0) for name, up in ups.items()}
    nowhere = ~torch.stack([*used.values()]).any(0)
    if bool(nowhere.all()):
        return dict.fromkeys(ups, nowhere)
    return {name: columns | nowhere for name, columns in used.items() if bool(columns.any())}


def _read(file: TensorFile, name: str, factor: float) -> Tensor:
    values = at_most_fp32(file.read(name))
    return values if factor == 1.0 else values.float() * factor


def _chosen(read: ReadTensor, dim: int, kept: Tensor) -> Tensor:
    """The rows or columns that are kept."""
    return read().index_select(dim, kept.nonzero().flatten())
