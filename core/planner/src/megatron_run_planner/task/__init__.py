"""The task of a configuration, as the planner sees it: read with few of its plugins, and written back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from megatron_run.config.merge import ConfigSource
from megatron_run.config.origin import section_of
from megatron_run.config.request import Request
from megatron_run.config.sources import read_sources
from megatron_run.config.validate import annotation_at, validate_section
from megatron_run.config.values import core_scalar, read_text, typed
from megatron_run.config.yaml import yaml_text
from megatron_run.contracts.costs import ModelCosts
from megatron_run.contracts.schema import SECTIONS, ParallelSection, TrainSection
from megatron_run.errors import Findings, InputError
from megatron_run.errors.wording import nearest_multiples
from megatron_run.planning.batch_size import BatchRamp, total_steps
from megatron_run.planning.layer_split import is_uneven, layer_counts
from megatron_run.planning.rank_grid import ExpertSplit
from megatron_run.planning.taken import take
from megatron_run.registry.discover import Catalog, plain_name, scan
from megatron_run.registry.known import known_plugin
from megatron_run_planner.devices import Device
from megatron_run_planner.schedules import Schedules, named
from megatron_run_planner.search import MICRO_BATCHES, STEADY, Candidate, Growth, Open, Search
from megatron_run_planner.split_samples import METHODS, check
from megatron_run_planner.task.model import read_model
from megatron_run_planner.task.optimizer import chosen_by_split, lending, on_host, optimizer_of, optimizers
from megatron_run_planner.workload import OPTIMIZERS, ContextMethod, ModelSplit, Optimizer, Recompute, split_over

#: Parameters of layers are 12 L h^2; with h = 128 L, as GPT-3's larger models have, that is 12 * 128^2 L^3.
_ASPECT = 128
#: GPT-2's.
_VOCABULARY = 50257
#: Keys of ``parallel`` that a split sets, 1 where nothing does.
_SIZES = ("tensor", "context", "pipeline", "chunks", "data", "expert")
#: Keys of ``parallel`` that say how layers are split, and how each is unset; a chosen split has counts alone.
_LAYER_KEYS = {
    "layers": (),
    "first_stage_layers": None,
    "last_stage_layers": None,
    "embedding_as_layer": False,
    "loss_as_layer": False,
}


@dataclass(frozen=True)
class Task:
    """A model to train, the split that the configuration has, and the configuration itself.

    ``split`` is its sections ``train`` and ``parallel`` over ``ranks``; ``steps`` is None when the run has no length.
    ``schedule`` is named with its options, and ``counts`` are the layers of each place where the user gave them.
    ``growth`` is that of the batch by ``train.ramp_up``, ``optimizers`` are those from which a search may choose.
    """

    model: ModelCosts
    split: ModelSplit
    schedule: str
    counts: tuple[int, ...]
    steps: int | None
    sections: Mapping[str, Any]
    growth: Growth = STEADY
    optimizers: tuple[Optimizer, ...] = OPTIMIZERS

    @property
    def reading(self) -> str:
        """The parts of the model that are read as something else, and why."""
        return "; ".join(self.model.approximations)

    @property
    def tokens(self) -> float | None:
        """Tokens of the whole run, if it has a length."""
        return self.steps * self.split.global_batch * self.model.sequence if self.steps else None

    def search(
        self, ranks: int, device: Device, schedules: Schedules, micro_batches: tuple[int, ...] = MICRO_BATCHES
    ) -> Search:
        """The search for its best split over ``ranks`` of ``device``, with microbatches of these sizes."""
        split = self.split
        return Search(
            self.model,
            ranks,
            split.global_batch,
            device,
            schedules,
            self.growth,
            like=split,
            left=Open(self.optimizers, micro_batches),
        )


def sized(parameters: float, sequence: int = 2048, global_batch: int = 1024) -> dict[str, Any]:
    """The configuration of a GPT of about ``parameters``: hidden about 128 x layers, in heads of 128.

    Heads and layers are multiples of powers of two as far as the size allows, so that ranks can share them: a model of
    127 heads could not be split over tensor ranks at all.
    """
    heads = _shared((parameters / (12 * _ASPECT**2)) ** (1 / 3), least=3, step=8)
    hidden = _ASPECT * heads
    layers = _shared((parameters - _VOCABULARY * hidden) / (12 * hidden**2), least=6, step=4)
    model = {"use": "gpt", "num_layers": layers, "hidden_size": hidden, "num_heads": heads}
    model |= {"vocab_size": _VOCABULARY, "dropout": 0.0}
    train = {"sequence_length": sequence, "global_batch_size": global_batch, "steps": 1000, "precision": "bf16"}
    return {"version": 1, "model": model, "train": train, "data": {"use": "mock", "vocab_size": _VOCABULARY}}


def _shared(number: float, least: int, step: int) -> int:
    """The multiple nearest to ``number`` of the largest power of two up to ``step`` that fits ``least`` times."""
    while step > 1 and number < least * step:
        step //= 2
    return max(1, round(number / step)) * step


def read_task(request: Request, ranks: int | None) -> Task:
    """The task of ``request`` over ``ranks`` devices, or over as many as its sizes make.

    Raises :class:`~megatron_run.errors.Problems` for a wrong configuration, and :class:`InputError` when the model has
    no sizes.
    """
    findings, notices = Findings(), list[str]()
    merged, plugins = take(
        read_sources(request, findings, notices),
        scan(),
        findings,
        notices,
        imported=("model", "schedule"),
        plan_only=True,
    )
    train = validate_section(TrainSection, "train", merged.values, findings)
    parallel = validate_section(ParallelSection, "parallel", merged.values, findings)
    findings.settle()
    assert train is not None, "what is wrong was raised"
    assert parallel is not None, "and so was this"
    model = read_model(merged, plugins, train, findings)
    ways = parallel.tensor * parallel.context * parallel.pipeline
    copies = max(1, ranks // ways) if ranks else parallel.data or 1
    split = ModelSplit(
        tensor=parallel.tensor,
        context=parallel.context,
        method=_method(merged),
        pipeline=parallel.pipeline,
        chunks=parallel.chunks,
        data=copies,
        expert=parallel.expert,
        micro_batch=train.micro_batch_size,
        global_batch=train.global_batch_size,
        recompute=_recomputed(train),
        sequence_parallel=parallel.sequence,
        scatter_messages=parallel.scatter_messages,
        optimizer=optimizer_of(merged),
        lending=lending(merged),
        on_host=on_host(merged),
        overlap=True,
        gradient_bytes=4,
        one_graph=_captures_step(merged),
    )
    counts = parallel.layers
    if is_uneven(parallel):
        counts = layer_counts(
            len(model.layers), parallel, [index % split.pipeline for index in range(split.pipeline * split.chunks)]
        )
    steps = train.steps or (train.samples and train.samples // train.global_batch_size)
    schedule, sections = _schedule(merged, split), _sections(merged)
    return Task(model, split, schedule, counts, steps, sections, _growth(train), optimizers(merged))


def _growth(train: TrainSection) -> Growth:
    """How the batch grows; the sizes that it jumps over, or that the run ends before, are no part of it."""
    if train.ramp_up is None:
        return STEADY
    ramp, steps = BatchRamp.from_config(train), total_steps(train)
    batches = {part.size for part in ramp.stretches if part.step < steps}
    return Growth((ramp.start, ramp.increment), tuple(sorted(batches - {train.global_batch_size})))


def _schedule(merged: ConfigSource, split: ModelSplit) -> str:
    """The schedule that the configuration chooses, with its options; for a pipeline without one, the usual one."""
    name = merged.choices["schedule"][0].reference
    if name == "sequential" and split.pipeline > 1:
        return "1f1b" if split.chunks == 1 else "interleaved"
    options = {key[1]: value.data for key, value in merged.values.items() if key[0] == "schedule" and len(key) == 2}
    return " ".join([name, *(f"{key}={value}" for key, value in options.items() if value is not None)])


def _method(merged: ConfigSource) -> ContextMethod:
    """The ``method`` of parallel-layer=context; that which it has by itself, where nothing says one."""
    given = merged.values.get((section_of("parallel-layer"), "method"))
    for method in METHODS:
        if given is not None and given.data == method:
            return method
    return METHODS[0]


def _captures_step(merged: ConfigSource) -> str:
    """The graph capture whose scope is the whole step; empty for another scope."""
    scope = merged.values.get((section_of("graph-capture"), "scope"))
    whole = scope is not None and scope.data in ("step", ["step"], ("step",))
    return merged.choices["graph-capture"][0].reference if whole else ""


def _recomputed(train: TrainSection) -> Recompute:
    """The planner's nearest to ``train.recompute``."""
    if isinstance(train.recompute, str):
        return train.recompute
    return "mlp" if "mlp" in train.recompute else "core"


def check_sizes(task: Task, ranks: int | None) -> None:
    """Raise :class:`InputError` unless devices, batch, heads, features, layers and experts of the task's split divide.

    Heads, features and experts are checked by what checks them when a run starts and its layers are built.
    """
    model, split = task.model, task.split
    if ranks not in (None, split.ranks):
        axes = {"tensor": split.tensor, "context": split.context, "pipeline": split.pipeline}
        over = " x ".join(f"parallel.{axis}={size}" for axis, size in axes.items() if axis != "context" or size > 1)
        raise InputError(
            f"{ranks} devices do not divide over {over}", fix=f"take a multiple of {prod(axes.values())} devices"
        )
    if split.global_batch % (split.micro_batch * split.data):
        raise InputError(
            f"train.global_batch_size={split.global_batch} does not divide over {split.data} copies of the model with "
            f"microbatches of {split.micro_batch}",
            fix=f"set it to {nearest_multiples(split.global_batch, split.micro_batch * split.data)}",
        )
    if wrong := task.growth.undealt(split):
        raise InputError(
            f"train.ramp_up does not divide over {split.data} copies of the model with microbatches of "
            f"{split.micro_batch}: {wrong[0]} samples",
            fix=f"set start and increment to multiples of {split.micro_batch * split.data}",
        )
    split_over(model, split.tensor)
    check(model, split)
    if split.pipeline * split.chunks > len(model.layers):
        raise InputError(
            f"{len(model.layers)} layers are fewer than the places of parallel.pipeline={split.pipeline} x "
            f"parallel.chunks={split.chunks}",
            fix="lower them",
        )
    parallel = ParallelSection(tensor=split.tensor, pipeline=split.pipeline, data=split.data, expert=split.expert)
    ExpertSplit(model.experts, parallel, None, split.ranks).check()


def check_one_batch(task: Task) -> None:
    """Raise :class:`InputError` where the batch grows: lists that a search has found are for one of its sizes."""
    if task.growth.batches:
        raise InputError(
            "a schedule found by search is for one number of microbatches",
            why=f"train.ramp_up has {len(task.growth.batches) + 1} sizes of the batch",
            fix="leave --write or train.ramp_up out",
        )


def _typed(value: Any) -> Any:
    """A value as YAML reads it; the command line gives text."""
    return core_scalar(value) if isinstance(value, str) else value


def _sections(merged: ConfigSource) -> dict[str, Any]:
    """The configuration as nested plain data."""
    data: dict[str, Any] = {}
    for kind, choices in merged.choices.items():
        if words := [choice.reference for choice in choices]:
            data[section_of(kind)] = {"use": words if kind == "observer" else "+".join(words)}
    for key, value in merged.values.items():
        if value.inherited:
            continue
        holder = data
        for part in key[:-1]:
            holder = holder.setdefault(part, {})
        section = SECTIONS.get(key[0])
        if section and isinstance(value.data, str):  # text from the command line, of a list too
            annotation = annotation_at(section, key[:1], key[1:], value.origin)
            holder[key[-1]] = read_text(value.data, annotation)
        else:
            holder[key[-1]] = _typed(value.data)
    return data


def written(task: Task, chosen: Candidate) -> str:
    """The configuration of ``task`` with the split and the schedule of ``chosen``, as a YAML file."""
    data = _with_split(task, chosen)
    return yaml_text({"version": 1, **{name: keys for name, keys in data.items() if name != "version"}})


def to_type(task: Task, chosen: Candidate) -> list[str]:
    """The settings KEY=VALUE after the configuration of ``task`` that give what :func:`written` writes."""
    data, own = _with_split(task, chosen), task.sections.get("parallel", {})
    schedule, parallel, train = data["schedule"], data["parallel"], data["train"]
    usual = {**dict.fromkeys(_SIZES, 1), "sequence": False, "layers": []}
    words = {"schedule": schedule["use"], **{f"schedule.{key}": schedule[key] for key in schedule if key != "use"}}
    for key, value in usual.items():
        if parallel.get(key, value) != value or own.get(key, value) != value:
            words[f"parallel.{key}"] = parallel.get(key, value)
    words |= {f"parallel.{key}": unset for key, unset in _LAYER_KEYS.items() if key in own and key not in parallel}
    if train["micro_batch_size"] != 1 or task.split.micro_batch != 1:
        words["train.micro_batch_size"] = train["micro_batch_size"]
    words["train.recompute"] = train["recompute"]
    if chosen_by_split(data):
        words["optimizer"] = data["optimizer"]["use"]
    if chosen.split.tensor * chosen.split.context > 1:
        words["parallel-layer"] = data["parallel_layer"]["use"]
    if chosen.split.context > 1:
        words["parallel-layer.method"] = chosen.split.method
    return [f"{key}={typed(value)}" for key, value in words.items()]


def to_install(task: Task, chosen: Candidate, catalog: Catalog) -> list[str]:
    """The commands that bring the plugins that :func:`written` names, those of this project that ``catalog`` lacks."""
    commands = dict[str, None]()
    for section, keys in _with_split(task, chosen).items():
        kind, references = section.replace("_", "-"), keys.get("use", "") if isinstance(keys, dict) else ""
        for reference in references.split("+") if isinstance(references, str) else references:
            known = known_plugin(kind, plain_name(reference))
            if known and not catalog.offering(kind, known.name):
                commands[known.how_to_get] = None
    return list(commands)


def _with_split(task: Task, chosen: Candidate) -> dict[str, Any]:
    """The sections of ``task``, with the split and the schedule of ``chosen``."""
    split, data = (
        chosen.split,
        {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in task.sections.items()},
    )
    train = data.setdefault("train", {})
    recompute: Any = ["mlp"] if split.recompute == "mlp" else split.recompute
    if split == task.split:  # the configuration may name segments that no split has
        recompute = train.get("recompute", recompute)
    train.update(micro_batch_size=split.micro_batch, recompute=recompute)
    kept = data.get("parallel", {})
    sizes = {key: getattr(split, key) for key in _SIZES}
    more: dict[str, Any] = {"sequence": split.sequence_parallel}
    if chosen.uneven:
        more["layers"] = list(chosen.uneven)
    data["parallel"] = {**{key: value for key, value in kept.items() if key not in _LAYER_KEYS}, **sizes, **more}
    schedule, choices = named(chosen.schedule)
    data["schedule"] = {"use": schedule, **choices}
    if chosen_by_split(data):  # another one is the user's choice
        data["optimizer"] = {**data.get("optimizer", {}), "use": split.optimizer}
    if split.tensor * split.context > 1:
        data["parallel_layer"] = _with_layers(data.get("parallel_layer", {}), split)
    return data


def _with_layers(section: Mapping[str, Any], split: ModelSplit) -> dict[str, Any]:
    """The section of the layers that split as ``split``: those of other packages say at a dry run if they do not."""
    plugins = section.get("use", "dense").split("+")
    if split.tensor > 1:
        plugins = ["tensor" if each == "dense" else each for each in plugins]
    if split.context == 1:
        return {**section, "use": "+".join(plugins)}
    plugins += [] if "context" in plugins else ["context"]  # last: it stacks on the attention of the others
    return {**section, "use": "+".join(plugins), "method": split.method}
