"""Every way to capture the graphs of one small run: arrangements of ranks, arithmetics, and ways to capture.

Each run with graphs is compared with the same run without. A batch that grows makes graphs be captured twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from megatron_run.config.request import Request
from tests.integration.grid import LITTLE, Shape

#: One step runs eagerly, the next ones are replayed; an evaluation lies between.
STEPS, EVALUATE = 4, 2
#: Steps of the small batch, where it grows; the run is one step longer.
SMALL = 2
MODEL = (*LITTLE, f"eval.interval={EVALUATE}")


@dataclass(frozen=True, order=True)
class Arrangement:
    """A schedule's ``shape`` over data- and tensor-parallel ranks; ``start`` is the M of the first steps if it grows.

    ``expert`` ranks share the experts of a layer.
    """

    shape: Shape
    data: int = 1
    tensor: int = 1
    expert: int = 1
    start: int = 0
    optimizer: str = "adamw"

    def __str__(self) -> str:
        parts = (
            f"from M{self.start}" * bool(self.start),
            f"data {self.data}" * (self.data > 1),
            f"tensor {self.tensor}, sequence" * (self.tensor > 1),
            f"expert {self.expert}" * (self.expert > 1),
            self.optimizer * (self.data > 1),
        )
        return ", ".join([str(self.shape), *filter(None, parts)])

    @property
    def world(self) -> int:
        """Ranks that it needs."""
        return self.shape.stages * self.data * self.tensor

    @property
    def steps(self) -> int:
        """Of its runs."""
        return STEPS + bool(self.start)

    @property
    def captured_at(self) -> list[int]:
        """The steps before which graphs are captured: after one eager step, and after one of another size."""
        return [2, SMALL + 2] if self.start else [2]

    @property
    def counts(self) -> list[int]:
        """Layers of each place in the order of the layout: unequal ones, two layers more than places."""
        places = self.shape.stages * self.shape.chunks
        layers = places + 2
        return [layers * (k + 1) // places - layers * k // places for k in range(places)]

    @property
    def sets(self) -> tuple[str, ...]:
        """As settings."""
        shape, counts = self.shape, self.counts
        small = self.start * self.data
        full = shape.microbatches * self.data
        grows = (
            f"train.ramp_up.start={small}",
            f"train.ramp_up.increment={full - small}",
            f"train.ramp_up.samples={SMALL * small}",
        )
        return (
            f"train.steps={self.steps}",
            f"train.global_batch_size={full}",
            f"model.num_layers={sum(counts)}",
            f"parallel.pipeline={shape.stages}",
            f"parallel.chunks={shape.chunks}",
            f"parallel.tensor={self.tensor}",
            f"parallel.expert={self.expert}",
            *([f"parallel.layers={','.join(map(str, counts))}"] if len(set(counts)) > 1 else ()),
            *(grows if self.start else ()),
            *(("parallel.sequence=true",) if self.tensor > 1 else ()),
        )

    @property
    def plugins(self) -> tuple[str, ...]:
        """As a user chooses them."""
        layers = ("parallel-layer=tensor",) * (self.tensor > 1)
        return (self.shape.plugin, f"optimizer={self.optimizer}", *layers)


ALONE = (
    Arrangement(Shape("sequential", 1, 1, 3)),
    Arrangement(Shape("sequential", 1, 1, 4), start=2),
    Arrangement(Shape("gpipe", 1, 2, 3)),
    Arrangement(Shape("1f1b", 1, 1, 3)),
    Arrangement(Shape("zero-bubble,variant=h1", 1, 1, 3)),
    Arrangement(Shape("zero-bubble,variant=v", 1, 2, 4), start=2),
)
TWO_STAGES = (
    Arrangement(Shape("gpipe", 2, 1, 3)),
    Arrangement(Shape("gpipe", 2, 2, 4), start=2),
    Arrangement(Shape("1f1b", 2, 1, 5)),
    Arrangement(Shape("1f1b", 2, 1, 4), start=2),
    Arrangement(Shape("interleaved", 2, 2, 4), start=2),
    Arrangement(Shape("interleaved", 2, 3, 4)),
    Arrangement(Shape("interleaved", 2, 2, 5, group=3)),
    Arrangement(Shape("zero-bubble,variant=h1", 2, 1, 5)),
    Arrangement(Shape("zero-bubble,variant=h1", 2, 1, 4), start=2),
    Arrangement(Shape("zero-bubble,variant=v", 2, 2, 5)),
    Arrangement(Shape("zero-bubble,variant=v", 2, 2, 4), start=2),
)
FOUR_STAGES = (
    Arrangement(Shape("gpipe", 4, 1, 5)),
    Arrangement(Shape("1f1b", 4, 1, 8), start=4),
    Arrangement(Shape("interleaved", 4, 2, 8), start=4),
    Arrangement(Shape("interleaved", 4, 2, 9, group=5)),
    Arrangement(Shape("zero-bubble,variant=h1", 4, 1, 5)),
    Arrangement(Shape("zero-bubble,variant=v", 4, 2, 5)),
)
#: adamw reduces gradients while the backward runs; zero1 also gathers parameters while the next step runs.
GATHERED = "zero1,overlap_param_gather=true"
SPREAD = (
    Arrangement(Shape("sequential", 1, 1, 3), data=2),
    Arrangement(Shape("sequential", 1, 1, 4), data=2, start=2, optimizer="zero1"),
    Arrangement(Shape("sequential", 1, 1, 3), data=2, optimizer=GATHERED),
    Arrangement(Shape("sequential", 1, 1, 3), tensor=2),
    Arrangement(Shape("sequential", 1, 1, 3), data=2, expert=2),
    Arrangement(Shape("1f1b", 2, 1, 4), data=2, start=2, optimizer=GATHERED),
    Arrangement(Shape("interleaved", 2, 2, 4), data=2),
    Arrangement(Shape("interleaved", 2, 2, 4), tensor=2, start=2),
    Arrangement(Shape("zero-bubble,variant=h1", 2, 1, 3), data=2, optimizer="zero1"),
)
ARRANGEMENTS = (*ALONE, *TWO_STAGES, *FOUR_STAGES, *SPREAD)


@dataclass(frozen=True, order=True)
class Network:
    """What the model computes, and what of it can be captured.

    ``regions`` are those of a layer: as many as it has pieces between segments that run eagerly, or that both draw
    random numbers.
    """

    name: str
    sets: tuple[str, ...]
    scope: tuple[str, ...]
    regions: int

    def __str__(self) -> str:
        return self.name


DENSE = ("embedding", "attn", "mlp", "head", "loss")
EXPERTS = ("moe_router", "moe_preprocess", "moe_combine")
#: Every second layer has experts, whose dispatch runs eagerly.
WITH_EXPERTS = ("model.experts.count=4", "model.experts.top_k=2", "model.experts.layer_freq=2")
UNTIED, TIED = "model.tie_embeddings=false", "model.tie_embeddings=true"
NETWORKS = (
    Network("dense", (UNTIED, "model.dropout=0"), DENSE, 1),
    Network("tied", (TIED, "model.dropout=0"), DENSE, 1),
    Network("tied, dropout", (TIED, "model.dropout=0.1"), DENSE, 2),
    Network("experts, dropout", (UNTIED, "model.dropout=0.1", *WITH_EXPERTS), (*DENSE, *EXPERTS), 2),
)
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, order=True)
class Way:
    """How graphs are captured."""

    reuse: str
    chain: bool

    def __str__(self) -> str:
        return f"{self.reuse}, {'chained' if self.chain else 'copied'}"

    def plugin(self, scope: Sequence[str]) -> str:
        """The choice of graph capture, as a user types it."""
        options = f"graph_reuse={self.reuse},chain={str(self.chain).lower()}"
        return f"graph-capture=partial,scope={','.join(scope)},{options}"


WAYS = tuple(Way(*each) for each in product(("per_microbatch", "per_slot"), (True, False)))


@dataclass(frozen=True, order=True)
class Case:
    """One training run; ``way`` None runs eagerly."""

    arrangement: Arrangement
    network: Network
    precision: str
    way: Way | None = None

    def __str__(self) -> str:
        return f"{self.arrangement}; {self.network}; {self.precision}; {self.way or 'eager'}"

    @property
    def reordered(self) -> bool:
        """Whether some gradient is added up in another order than without capture, so that its last bits may differ.

        Captured weight gradients come at I, others at W. It matters where two chunks of one stage add to the same
        gradient, and a V is the schedule that puts both ends of a model on one stage.
        """
        return "tied" in self.network.name and self.arrangement.shape.schedule == "zero-bubble,variant=v"

    @property
    def eager(self) -> Case:
        """The same without capture."""
        return replace(self, way=None)

    @property
    def request(self) -> Request:
        """What a user would type."""
        scaler = ("scaler=dynamic,initial_loss_scale=1024",) if self.precision == "fp16" else ()
        capture = (self.way.plugin(self.network.scope),) if self.way else ()
        return Request(
            configs=("preset:tiny",),
            sets=(*MODEL, *self.network.sets, *self.arrangement.sets, f"train.precision={self.precision}"),
            plugins=(*self.arrangement.plugins, *scaler, *capture),
            nproc=self.arrangement.world,
        )


def trainings(arrangements: Sequence[Arrangement] = ARRANGEMENTS) -> Iterator[Case]:
    """Every arrangement with every network, eagerly; the precision goes round, so that each arrangement meets all."""
    for turn, arrangement in enumerate(arrangements):
        for place, network in enumerate(NETWORKS):
            if arrangement.expert == 1 or network.scope != DENSE:
                yield Case(arrangement, network, PRECISIONS[(turn + place) % len(PRECISIONS)])


def whole_product() -> list[Case]:
    """Every training in every way of capture."""
    return [replace(case, way=way) for case in trainings() for way in WAYS]


def selection() -> list[Case]:
    """Few of it, over at most two stages, that meet every schedule, network, precision and way.

    Graphs over data- and tensor-parallel ranks have tests of their own, beside the plugin's.
    """
    arrangements = (ALONE[1], ALONE[2], ALONE[3], TWO_STAGES[4], TWO_STAGES[7], ALONE[5])
    chosen = []
    for turn, arrangement in enumerate(arrangements):
        network, precision = NETWORKS[turn % len(NETWORKS)], PRECISIONS[turn % len(PRECISIONS)]
        chosen.append(Case(arrangement, network, precision, WAYS[(turn + turn // 4) % len(WAYS)]))
    return chosen
