"""Plans with the schedule alone, for ``schedule show``: no other plugin of ours is loaded, and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from megatron_run.config.merge import ConfigSource, merge
from megatron_run.config.origin import Key, Origin, Value
from megatron_run.config.request import Request
from megatron_run.config.sources import read_sources
from megatron_run.config.validate import validate_section
from megatron_run.contracts.schema import ParallelSection, Section, TrainSection
from megatron_run.errors import Findings, RunError
from megatron_run.pipeline.plan import Plan
from megatron_run.planning.layer_split import natural_layers
from megatron_run.planning.plans import microbatch_counts, plan_run
from megatron_run.planning.rank_grid import attribute, infer_sizes
from megatron_run.planning.taken import take
from megatron_run.registry.compatibility import unserved
from megatron_run.registry.discover import scan
from megatron_run.registry.loaded_plugin import Plugin

_LAYERS: Key = ("model", "num_layers")
_BATCH: Key = ("train", "global_batch_size")


class _Model(Section):
    """The one option of the model that a schedule needs."""

    num_layers: int = Field(ge=1)


@dataclass(frozen=True)
class Shape:
    """Overrides from the command's options; None keeps the configuration's value."""

    stages: int | None = None
    chunks: int | None = None
    microbatches: int | None = None
    layers: int | None = None


@dataclass(frozen=True)
class Asked:
    """A schedule and the shape to plan."""

    schedule: Plugin
    parallel: ParallelSection
    layers: int
    microbatches: int
    notices: tuple[str, ...]
    origins: Mapping[Key, Origin]

    def plan(self) -> Plan:
        """The verified plan of a step.

        Raises :class:`~megatron_run.errors.InputError` when the schedule refuses the shape, and
        :class:`~megatron_run.errors.ScheduleError` when what it answers is no legal plan.
        """
        try:
            _, plans = plan_run(self.schedule, self.layers, self.parallel, (self.microbatches,))
        except RunError as error:
            attribute(error, self.origins)
            raise
        return plans[self.microbatches]


def ask_schedule(request: Request, shape: Shape) -> Asked:
    """The schedule of ``request`` in ``shape``; of the other first-party plugins none is imported.

    The number of microbatches is the largest that occurs in the run. The layers are ``model.num_layers``; where no
    CONFIG is given and the shape says how many places there are, one layer a place. Raises
    :class:`~megatron_run.errors.Problems`.
    """
    findings, notices = Findings(), list[str]()
    catalog = scan()
    merged = merge((read_sources(request, findings, notices), _shape_source(shape)))
    if shape.layers is None and not request.configs and (shape.stages or shape.chunks):
        preset = merged.values.get(_LAYERS)  # which stands in for a CONFIG
        if preset and preset.origin.source == "file":
            del merged.values[_LAYERS]
    merged, plugins = take(merged, catalog, findings, notices, imported=("schedule",))
    ready = plugins.get("schedule", ())
    origins = {key: value.origin for key, value in merged.values.items()}
    if shape.microbatches:  # what is said of the batch size is said of them
        origins[_BATCH] = Origin("command line", f"--microbatches {shape.microbatches}")
    parallel = validate_section(ParallelSection, "parallel", merged.values, findings)
    microbatches = layers = None
    if parallel:
        microbatches = shape.microbatches or _microbatches(merged, parallel, request.nproc, findings)
        layers = shape.layers or _layers(merged.values, parallel, findings)
        asked = {f"parallel.{key}": getattr(parallel, key) for key in ("pipeline", "chunks")}
        for problem in unserved(asked, ready, catalog) if ready else ():
            findings.add(problem)
    for error in findings.problems:
        attribute(error, origins)
    findings.settle()
    assert parallel is not None, "what is missing was found and raised"
    assert layers is not None, "and so were wrong layers"
    assert microbatches is not None, "and microbatches that do not divide"
    return Asked(ready[0], parallel, layers, microbatches, tuple(notices), origins)


def _shape_source(shape: Shape) -> ConfigSource:
    """The shape as the strongest source of configuration."""
    source = ConfigSource()
    keys = (("stages", ("parallel", "pipeline")), ("chunks", ("parallel", "chunks")), ("layers", _LAYERS))
    for option, key in keys:
        size = getattr(shape, option)
        if size is not None:
            source.put(key, size, Origin("command line", f"--{option} {size}"))
    return source


def _layers(values: Mapping[Key, Value], parallel: ParallelSection, findings: Findings) -> int | None:
    if _LAYERS not in values:
        return natural_layers(parallel)
    model = validate_section(_Model, "model", {_LAYERS: values[_LAYERS]}, findings)
    return model.num_layers if model else None


def _microbatches(merged: ConfigSource, parallel: ParallelSection, nproc: int | None, findings: Findings) -> int | None:
    """The most microbatches of a step of the run."""
    train = validate_section(TrainSection, "train", merged.values, findings)
    if train:
        with findings.collect():
            return max(microbatch_counts(train, infer_sizes(parallel, nproc).data))
    return None
