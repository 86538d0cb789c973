"""What a configuration asks for, as the planner sees it; read without loading any plugin, and written back.

A model is known by the options that model ``gpt`` has; other models that use the same names are read alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_run.config.merge import ConfigSource
from megatron_run.config.origin import section_of
from megatron_run.config.request import Request
from megatron_run.config.sources import read_sources
from megatron_run.config.validate import validate_section
from megatron_run.config.values import core_scalar
from megatron_run.config.yaml import yaml_text
from megatron_run.contracts.schema import ParallelSection, TrainSection
from megatron_run.errors import Findings, InputError, nearest_multiples
from megatron_run.planning.layer_split import is_uneven, layer_counts
from megatron_run_planner.schedules import named
from megatron_run_planner.search import Candidate
from megatron_run_planner.workload import Model, Recompute, Split

#: Parameters of layers are 12 L h^2; with h = 128 L, as GPT-3's larger models have, that is 12 * 128^2 L^3.
_ASPECT = 128


#: Activations of two matrices in.
_GATED = ("swiglu", "geglu", "geglu_tanh")


class _Options(BaseModel):
    """The options of a decoder that decide its time and memory; others are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int | None = None
    head_size: int | None = None
    ffn_size: int | None = None
    vocab_size: int | None = None
    activation: str = "gelu"
    tie_embeddings: bool = True
    experts: int = 0
    top_k: int = 2
    expert_ffn_size: int | None = None


@dataclass(frozen=True)
class Task:
    """A model to train, the split that the configuration has, and the configuration itself.

    ``split`` is its sections ``train`` and ``parallel`` over ``ranks``; ``steps`` is None when the run has no length.
    ``schedule`` is named with its options, and ``counts`` are the layers of each place where the user gave them.
    """

    model: Model
    split: Split
    schedule: str
    counts: tuple[int, ...]
    steps: int | None
    sections: Mapping[str, Any]

    @property
    def tokens(self) -> float | None:
        """Tokens of the whole run, if it has a length."""
        return self.steps * self.split.global_batch * self.model.sequence if self.steps else None


def sized(parameters: float, sequence: int = 2048, global_batch: int = 1024) -> dict[str, Any]:
    """The configuration of a GPT of about ``parameters``: hidden = 128 x layers, heads of 128."""
    layers = max(1, round((parameters / (12 * _ASPECT**2)) ** (1 / 3)))
    model = {"use": "gpt", "num_layers": layers, "hidden_size": _ASPECT * layers, "num_heads": layers}
    model |= {"vocab_size": 50257, "dropout": 0.0}
    train = {"sequence_length": sequence, "global_batch_size": global_batch, "steps": 1000, "precision": "bf16"}
    return {"version": 1, "model": model, "train": train, "data": {"use": "mock", "vocab_size": 50257}}


def read_task(request: Request, ranks: int | None) -> Task:
    """The task of ``request`` over ``ranks`` devices, or over as many as its sizes make.

    Raises :class:`~megatron_run.errors.Problems` for a wrong configuration, and :class:`InputError` when the model has
    no sizes.
    """
    findings, notices = Findings(), list[str]()
    merged = read_sources(request, findings, notices)
    train = validate_section(TrainSection, "train", merged.values, findings)
    parallel = validate_section(ParallelSection, "parallel", merged.values, findings)
    findings.settle()
    assert train is not None, "what is wrong was raised"
    assert parallel is not None, "and so was this"
    model = _model(merged, train)
    ways = parallel.tensor * parallel.pipeline
    copies = max(1, ranks // ways) if ranks else parallel.data or 1
    split = Split(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        chunks=parallel.chunks,
        data=copies,
        expert=parallel.expert,
        micro_batch=train.micro_batch_size,
        global_batch=train.global_batch_size,
        recompute=_recomputed(train),
        sequence_parallel=parallel.sequence,
        scatter_messages=parallel.scatter_messages,
        zero1=any(choice.word == "zero1" for choice in merged.choices.get("optimizer", ())),
        overlap=True,
        gradient_bytes=4,
    )
    counts = parallel.layers
    if is_uneven(parallel):
        counts = layer_counts(
            model.layers, parallel, [index % split.pipeline for index in range(split.pipeline * split.chunks)]
        )
    steps = train.steps or (train.samples and train.samples // train.global_batch_size)
    return Task(model, split, _schedule(merged, split), counts, steps, _sections(merged))


def _schedule(merged: ConfigSource, split: Split) -> str:
    """The schedule that the configuration chooses, with its options; for a pipeline without one, the usual one."""
    word = merged.choices["schedule"][0].word
    if word == "sequential" and split.pipeline > 1:
        return "1f1b" if split.chunks == 1 else "interleaved"
    options = {key[1]: value.data for key, value in merged.values.items() if key[0] == "schedule" and len(key) == 2}
    return " ".join([word, *(f"{key}={value}" for key, value in options.items() if value is not None)])


def _recomputed(train: TrainSection) -> Recompute:
    """What the planner has nearest to ``train.recompute``."""
    if isinstance(train.recompute, str):
        return train.recompute
    return "mlp" if "mlp" in train.recompute else "core"


def check_sizes(task: Task, ranks: int | None) -> None:
    """Raise :class:`InputError` unless devices, batch, heads and layers of the task's own split divide."""
    model, split = task.model, task.split
    ways = split.tensor * split.pipeline
    if ranks not in (None, split.ranks):
        raise InputError(
            f"{ranks} devices do not divide over parallel.tensor={split.tensor} x parallel.pipeline={split.pipeline}",
            fix=f"take a multiple of {ways} devices",
        )
    if split.global_batch % (split.micro_batch * split.data):
        raise InputError(
            f"train.global_batch_size={split.global_batch} does not divide over {split.data} copies of the model with "
            f"microbatches of {split.micro_batch}",
            fix=f"set it to {nearest_multiples(split.global_batch, split.micro_batch * split.data)}",
        )
    if model.heads % split.tensor or split.pipeline * split.chunks > model.layers:
        raise InputError(
            f"{model.heads} heads and {model.layers} layers do not divide over parallel.tensor={split.tensor}, "
            f"parallel.pipeline={split.pipeline}, parallel.chunks={split.chunks}",
            fix="lower them",
        )


def _model(merged: ConfigSource, train: TrainSection) -> Model:
    given = {key[1]: _typed(value.data) for key, value in merged.values.items() if key[0] == "model" and len(key) == 2}
    try:
        options = _Options.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"model.{name}: {first['msg'].lower()}", fix="plan needs num_layers, hidden_size and num_heads"
        ) from None
    told = merged.values.get(("data", "vocab_size"))
    return Model(
        layers=options.num_layers,
        hidden=options.hidden_size,
        heads=options.num_heads,
        sequence=train.sequence_length,
        vocabulary=options.vocab_size or (int(_typed(told.data)) if told else 50257),
        kv_heads=options.num_kv_heads or 0,
        ffn=options.ffn_size or 0,
        gated=options.activation in _GATED,
        head=options.head_size or 0,
        experts=options.experts,
        top_k=options.top_k if options.experts else 0,
        expert_ffn=options.expert_ffn_size or 0,
        flash=True,
        tied=options.tie_embeddings,
    )


def _typed(value: Any) -> Any:
    """A value as YAML reads it; the command line gives text."""
    return core_scalar(value) if isinstance(value, str) else value


def _sections(merged: ConfigSource) -> dict[str, Any]:
    """The configuration as nested plain data."""
    data: dict[str, Any] = {}
    for kind, choices in merged.choices.items():
        if words := [choice.word for choice in choices]:
            data[section_of(kind)] = {"use": words if kind == "observer" else "+".join(words)}
    for key, value in merged.values.items():
        if value.inherited:
            continue
        holder = data
        for part in key[:-1]:
            holder = holder.setdefault(part, {})
        holder[key[-1]] = _typed(value.data)
    return data


def written(task: Task, chosen: Candidate) -> str:
    """The configuration of ``task`` with the split and the schedule of ``chosen``, as a YAML file."""
    split, data = (
        chosen.split,
        {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in task.sections.items()},
    )
    data.setdefault("train", {}).update(
        micro_batch_size=split.micro_batch, recompute=["mlp"] if split.recompute == "mlp" else split.recompute
    )
    kept = data.get("parallel", {})
    sizes = {"tensor": split.tensor, "pipeline": split.pipeline, "chunks": split.chunks, "data": split.data}
    more: dict[str, Any] = {"sequence": split.sequence_parallel, "expert": split.expert}
    drop = {"layers", "first_stage_layers", "last_stage_layers"}
    data["parallel"] = {**{key: value for key, value in kept.items() if key not in drop}, **sizes, **more}
    places = split.pipeline * split.chunks
    if task.model.layers % places:
        each, left = divmod(task.model.layers, places)
        data["parallel"]["layers"] = [each + 1] * left + [each] * (places - left)
    word, choices = named(chosen.schedule)
    data["schedule"] = {"use": word, **choices}
    optimizer, layers = (data.get(name, {}) for name in ("optimizer", "parallel_layer"))
    if optimizer.get("use", "adamw") in ("adamw", "zero1"):  # another one is the user's choice
        data["optimizer"] = {**optimizer, "use": "zero1" if split.zero1 else "adamw"}
    if split.tensor > 1:  # layers of other packages split too, or say at the dry run that they do not
        words = layers.get("use", "dense").split("+")
        data["parallel_layer"] = {**layers, "use": "+".join("tensor" if word == "dense" else word for word in words)}
    return yaml_text({"version": 1, **{name: keys for name, keys in data.items() if name != "version"}})
