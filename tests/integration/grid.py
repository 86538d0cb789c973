"""Every way to run one small model through a pipeline: schedules, shapes, variants, and which shapes are refused.

P stages, V chunks a stage, M microbatches, G the size of a microbatch group. The rules are written from what the
schedules promise, not from their code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from megatron_run.config.request import Request
from tests.integration.pairwise import pairwise

#: Steps of the whole product, and of what `make test` runs of it: gradients leave as they arrive from the second on,
#: and the evaluation after it shows what they updated.
MANY, FEW = 20, 2
#: Little of everything: 20 steps take about a second.
LITTLE = (
    "model.hidden_size=16",
    "model.num_heads=2",
    "train.sequence_length=8",
    "train.micro_batch_size=1",
    "train.lr=1e-3",
    "eval.batches=1",
)
#: P -> the M that are tried: one, fewer than the stages, as many, one more, and twice as many.
MICROBATCHES = {1: (1, 3), 2: (1, 2, 3, 4, 5), 4: (1, 3, 4, 5, 8)}
CHUNKS = (1, 2, 3)
#: Group sizes that are tried besides the default: too small, with and without a remainder, the whole step, too large.
GROUPS = (1, 3, 4, 5, 6, 8, 9)


@dataclass(frozen=True, order=True)
class Variant:
    """What changes the arithmetic of a step: tied embeddings, dropout, activation checkpointing."""

    tied: bool = True
    dropout: bool = False
    recompute: bool = False

    def __str__(self) -> str:
        return " ".join(
            ["tied" if self.tied else "untied", *["dropout"] * self.dropout, *["recompute"] * self.recompute]
        )

    @property
    def sets(self) -> tuple[str, ...]:
        """As settings."""
        return (
            f"model.tie_embeddings={str(self.tied).lower()}",
            f"model.dropout={0.1 if self.dropout else 0.0}",
            f"train.recompute={'full' if self.recompute else 'none'}",
        )


VARIANTS = tuple(Variant(*switches) for switches in product((True, False), repeat=3))


@dataclass(frozen=True, order=True)
class Shape:
    """A schedule over P stages, V chunks and M microbatches; ``group`` is interleaved's G, 0 the default."""

    schedule: str
    stages: int
    chunks: int
    microbatches: int
    group: int = 0

    def __str__(self) -> str:
        group = f" G{self.group}" if self.group else ""
        return f"{self.schedule} P{self.stages} V{self.chunks} M{self.microbatches}{group}"

    @property
    def plugin(self) -> str:
        """The choice of the schedule, as a user types it."""
        return f"schedule={self.schedule}" + (f",group_size={self.group}" if self.group else "")

    @property
    def accepted(self) -> bool:
        """Whether the schedule promises to run this shape."""
        return RULES[self.schedule](self)


def whole_groups(shape: Shape) -> bool:
    """Interleaved: several stages and chunks; no group of microbatches, the last one too, smaller than the stages."""
    group = shape.group or shape.stages
    groups = [range(shape.microbatches)[first : first + group] for first in range(0, shape.microbatches, group)]
    enough = all(len(each) >= shape.stages for each in groups)
    return shape.stages > 1 and shape.chunks > 1 and len(groups[0]) == group and enough


#: Schedule -> whether it runs a shape.
RULES: Mapping[str, Callable[[Shape], bool]] = {
    "sequential": lambda shape: shape.stages == shape.chunks == 1,
    "gpipe": lambda shape: True,
    "1f1b": lambda shape: shape.chunks == 1,
    "interleaved": whole_groups,
    "zero-bubble,variant=h1": lambda shape: shape.chunks == 1,
    "zero-bubble,variant=v": lambda shape: shape.chunks == 2,
}


def shapes() -> Iterator[Shape]:
    """Every shape, accepted or not."""
    for schedule in RULES:
        for stages, chunks in product(MICROBATCHES, CHUNKS):
            grouped = schedule == "interleaved" and stages > 1 and chunks > 1
            for microbatches, group in product(MICROBATCHES[stages], (0, *GROUPS) if grouped else (0,)):
                yield Shape(schedule, stages, chunks, microbatches, group)


@dataclass(frozen=True, order=True)
class Case:
    """One training run: ``counts`` are parallel.layers when not as even as can be, ``data`` the data-parallel size.

    ``plugin`` replaces the choice of the schedule.
    """

    shape: Shape
    variant: Variant = Variant()
    layers: int = 0
    counts: tuple[int, ...] = ()
    data: int = 1
    plugin: str = ""
    steps: int = MANY

    def __str__(self) -> str:
        counts = f" layers {','.join(map(str, self.counts))}" if self.counts else ""
        data = f" data {self.data}" if self.data > 1 else ""
        return f"{self.shape}{counts}{data}, {self.variant}"

    @property
    def world(self) -> int:
        """Ranks that it needs."""
        return self.shape.stages * self.data

    @property
    def num_layers(self) -> int:
        """Layers of the model: at least one for each place."""
        return self.layers or (12 if self.shape.stages == 4 else 6)

    @property
    def reference(self) -> Case:
        """The same training without a pipeline, and with activations kept: equal data-parallel size and batch."""
        alone, kept = Shape("sequential", 1, 1, self.shape.microbatches), replace(self.variant, recompute=False)
        return Case(alone, kept, layers=self.num_layers, data=self.data, steps=self.steps)

    @property
    def request(self) -> Request:
        """What a user would type."""
        shape, layers, places = self.shape, self.num_layers, self.shape.stages * self.shape.chunks
        counts = self.counts or tuple(layers * (k + 1) // places - layers * k // places for k in range(places))
        sets = (
            *LITTLE,
            f"train.steps={self.steps}",
            *self.variant.sets,
            f"model.num_layers={layers}",
            f"train.global_batch_size={shape.microbatches * self.data}",
            f"parallel.pipeline={shape.stages}",
            f"parallel.chunks={shape.chunks}",
            *([f"parallel.layers={','.join(map(str, counts))}"] if len(set(counts)) > 1 else []),
        )
        plugins = (self.plugin or shape.plugin,)
        return Request(configs=("preset:tiny",), sets=sets, plugins=plugins, nproc=self.world)

    @property
    def axes(self) -> Mapping[str, Hashable]:
        """What it chooses: the selection has each of these, and some of their pairs."""
        return {**vars(self.shape), **vars(self.variant)}


def whole_product(steps: int = MANY) -> list[Case]:
    """Every accepted shape in every variant."""
    return [Case(shape, variant, steps=steps) for shape in shapes() if shape.accepted for variant in VARIANTS]


def telling(case: Case) -> bool:
    """Whether the shape shows what no other does.

    Left out are twice as many microbatches as stages, which are two groups to interleaved alone; groups of 4 and 8,
    which are the default or all microbatches, as a group of 5 is; and three chunks on four stages, as two stages have
    three. A group of 3 may leave a remainder.
    """
    shape = case.shape
    twice = shape.microbatches == 2 * shape.stages
    if shape.stages * shape.chunks > 8 or (twice and shape.schedule != "interleaved"):
        return False
    return shape.group in (0, 3, 5)


def small(case: Case) -> Case:
    """The same with one layer for each place, or as few more as make a model that other shapes have too."""
    places = case.shape.stages * case.shape.chunks
    return replace(case, layers=6 if places % 3 == 0 else max(places, 4))


#: Of two of these each pair of choices is selected: the arithmetic that a schedule may get wrong.
PAIRED = ("schedule", "tied", "dropout", "recompute")


def selection() -> list[Case]:
    """Few of it: each choice of telling shapes, and each pair of ``PAIRED``, for few steps of a small model.

    Pipelines only: on one stage every schedule has the order of ``sequential``.
    """
    cases = [small(case) for case in whole_product(FEW) if telling(case)]
    piped = [case for case in cases if case.shape.stages > 1 or case.shape.schedule == "sequential"]
    return pairwise(piped, lambda case: case.axes, PAIRED)
