"""Runs whose parameters are whole only where a segment needs them: each feature, in every arrangement of up to 4 ranks.

Each is compared with the run of ``zero1`` that is otherwise alike.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from tests.integration.context_grid import FEATURES as OF_SAMPLES
from tests.integration.context_grid import SETS, Feature, by_world
from tests.integration.pairwise import pairwise
from tests.integration.pieces import Array, Case
from tests.integration.whole_report import other_numbers
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.training import Seen, kept_groups, train_here

#: Samples of a step, and ranks of a run.
BATCH, MOST_RANKS = 4, 4
#: Relative to losses and norms, where gradients are added up in another order.
LOSSES, NORMS = 2e-6, 2e-5
#: Runs of one start of ranks.
RUNS = 24

#: Features that have nothing to do with how parameters are held.
_LEFT_OUT = ("scattered", "rope", "window", "document", "softcap", "pieces", "samples", "key for all")
FEATURES: Mapping[str, Feature] = {
    **{name: each for name, each in OF_SAMPLES.items() if not any(word in name for word in _LEFT_OUT)},
    "muon": Feature(("optimizer.rule=muon", "optimizer.adamw_for=embedding.*")),
    "momentum": Feature(("optimizer.rule=sgd", "optimizer.momentum=0.9")),
    "gradients of the parameters' type": Feature(
        # Untied: what two stages share is summed in fp32 here, and there in the type of the gradients.
        ("optimizer.grad_dtype=param", "model.tie_embeddings=false")
    ),
    "an overflow": Feature(("train.precision=fp16", "scaler.initial_loss_scale=1e9")),
    "zeros counted": Feature(("train.count_zeros=true",)),
}
SCHEDULES = ("1f1b", "interleaved", "zero-bubble,variant=h1", "zero-bubble,variant=v")


@dataclass(frozen=True)
class Split:
    """One run. ``held`` and ``reduce`` are zero3's options; with ``held`` -1 the optimizer is ``zero1``."""

    feature: str
    data: int = 2
    context: int = 1
    tensor: int = 1
    schedule: str = ""
    precision: str = "fp32"
    held: int = 2
    reduce: str = "microbatch"

    def __str__(self) -> str:
        ways = f"d{self.data}-c{self.context}-t{self.tensor}-p{self.pipeline}"
        return ", ".join([self.feature, ways, self.schedule or "-", self.precision, f"held {self.held}", self.reduce])

    @property
    def pipeline(self) -> int:
        return 2 if self.schedule else 1

    @property
    def world(self) -> int:
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def whole(self) -> Split:
        """The run that it must equal."""
        return replace(self, held=-1, reduce="step" if self.exact else "microbatch")

    @property
    def exact(self) -> bool:
        """Whether sums are in the same order, so that all bits are equal: gradients of a tie arrive twice."""
        return self.reduce == "step" or (self.data == BATCH and self.feature == "untied")

    @property
    def axes(self) -> Mapping[str, Any]:
        """What it chooses."""
        return vars(self)

    @property
    def possible(self) -> bool:
        """Whether it can run, shows its feature, and says something: 16 bits are compared where all bits are equal."""
        feature = FEATURES[self.feature]
        return (
            self.data * self.context > 1
            and self.world <= MOST_RANKS
            and feature.shown_by(self.tensor, self.pipeline, self.data, chunks=self._chunks)
            and (self.precision == "fp32" or self.exact)
            and (self.feature != "an overflow" or self.precision == "fp16")
            and not (self.feature == "muon" and not self.exact)  # it magnifies what is rounded
        )

    @property
    def _chunks(self) -> bool:
        return self.schedule in ("interleaved", "zero-bubble,variant=v")

    @property
    def case(self) -> Case:
        """What a user would type."""
        feature = FEATURES[self.feature]
        sizes = [f"parallel.{axis}={getattr(self, axis)}" for axis in ("data", "context", "tensor", "pipeline")]
        layers = ["tensor" if self.tensor > 1 else "dense"] + [feature.layers] * bool(feature.layers)
        layers += ["context"] * (self.context > 1)
        sets = [*SETS, f"train.precision={self.precision}", *feature.sets, *feature.split, *sizes]
        sets += ["parallel.chunks=2"] * self._chunks
        if self.exact:
            sets.append(
                "optimizer.bucket_size=1"
            )  # norms and gloo add in an order that depends on the place in a bucket
        optimizer = f"zero3,whole_below=0,segments_held={self.held},reduce={self.reduce}"
        plugins = [feature.data, f"optimizer={optimizer if self.held >= 0 else 'zero1'}"]
        plugins += [f"schedule={self.schedule}"] * bool(self.schedule)
        plugins += ["scaler=dynamic"] * (self.precision == "fp16")
        plugins += [f"parallel-layer={'+'.join(layers)}"]
        last = {each.partition("=")[0]: each for each in sets}
        return Case(tuple(last.values()), tuple(plugins))


PRODUCT = [
    split
    for split in (
        Split(*row)
        for row in product(
            FEATURES,
            (1, 2, 4),
            (1, 2),
            (1, 2),
            ("", *SCHEDULES),
            ("fp32", "bf16", "fp16"),
            (0, 2, 3),
            ("microbatch", "step"),
        )
    )
    if split.possible
]
AXES = [*vars(PRODUCT[0])]


def selection(count: int) -> list[Split]:
    """Rows of the product: each pair of two choices, and others until there are ``count``."""
    few = pairwise(PRODUCT, lambda split: split.axes, AXES)
    rest = [split for split in PRODUCT if split not in set(few)]
    return [*few, *Random(0).sample(rest, max(0, min(count - len(few), len(rest))))]


@dataclass
class Trained:
    """What became of one split: rank 0's numbers, and the saved state of all ranks; or the traceback of a rank."""

    split: Split
    seen: Seen
    state: dict[str, Array]
    failure: str = ""

    def faults(self, whole: Trained) -> Iterator[str]:
        """Where it differs from the run with whole parameters."""
        if self.failure or whole.failure:
            yield f"{self.split}: {(self.failure or whole.failure).strip()[-1500:]}"
            return
        tolerances = {"losses": LOSSES, "norms": NORMS, "validation": LOSSES}
        if self.split.exact:
            tolerances = dict.fromkeys(tolerances, 0.0)
        yield from other_numbers(self.split, self.seen, whole.seen, tolerances, equal_nan=True)  # norms of an overflow
        if not self.seen.losses or not self.seen.validation:
            yield f"{self.split}: {len(self.seen.losses)} steps, {len(self.seen.validation)} evaluations"
        if self.state.keys() != whole.state.keys():
            yield f"{self.split}: it has {self.state.keys() ^ whole.state.keys()}, or lacks them"
        elif self.split.exact:
            differ = [name for name, values in self.state.items() if not _same(values, whole.state[name])]
            if differ:
                yield f"{self.split}: {len(differ)} tensors of the state differ, {differ[0]} among them"


def _same(one: Array, other: Array) -> bool:
    return bool(np.array_equal(one, other, equal_nan=True))


def trained(splits: Sequence[Split]) -> Iterator[Trained]:
    """Train every split, those of one number of ranks in the same processes."""
    for world, members in by_world(splits).items():
        for batch in (members[start : start + RUNS] for start in range(0, len(members), RUNS)):
            cases = [split.case for split in batch]
            found = run_ranks(_run_cases, world, cases, timeout=120 + 45 * len(cases))
            for split, ranks in zip(batch, zip(*found, strict=True), strict=True):
                yield _joined(split, ranks)


#: A box of a tensor of the state: what it is, where it starts, its values.
Box = tuple[str, tuple[int, ...], Array]
#: A rank's numbers and its part of the state; or a traceback.
Found = tuple[Seen, list[Box]] | str


def _joined(split: Split, ranks: Sequence[Found]) -> Trained:
    failures = [rank for rank in ranks if isinstance(rank, str)]
    if failures:
        return Trained(split, Seen(), {}, failures[0])
    runs = [rank for rank in ranks if not isinstance(rank, str)]
    return Trained(split, runs[0][0], _whole(box for _, boxes in runs for box in boxes))


def _whole(boxes: Iterable[Box]) -> dict[str, Array]:
    """Whole tensors by name, of boxes that no two ranks have."""
    found: dict[str, list[Box]] = {}
    for box in boxes:
        found.setdefault(box[0], []).append(box)
    whole = {}
    for name, members in found.items():
        stops = [[start + size for start, size in zip(at, values.shape, strict=True)] for _, at, values in members]
        whole[name] = np.full([max(each) for each in zip(*stops, strict=True)], np.nan)
        for (_, at, values), stop in zip(members, stops, strict=True):
            whole[name][tuple(map(slice, at, stop))] = values
    return whole


def _run_cases(rank: int, world: int, cases: Sequence[Case]) -> list[Found]:
    with found_once(), kept_groups():
        return [_run_case(rank, world, case) for case in cases]


def _run_case(rank: int, world: int, case: Case) -> Found:
    """Train; keep this rank's boxes of the state after the last step."""
    from megatron_run.config.request import Request
    from megatron_run_engine.training import build

    assemblies, make = list[Any](), build.build

    def watched_build(*arguments: Any) -> Any:
        assemblies.append(make(*arguments))
        return assemblies[-1]

    request = Request(configs=("preset:tiny",), sets=case.sets, plugins=case.plugins, nproc=world)
    with mock.patch("megatron_run_engine.training.build.build", watched_build):
        try:
            seen = train_here(rank, world, request.to_json())
        except Exception:
            return traceback.format_exc()
    seen.gradients.clear()
    seen.plan = None
    pieces = assemblies[0].optimizer.iter_state()
    return seen, [(f"{e.name} {e.field}", e.starts, e.tensor.detach().float().numpy().copy()) for e in pieces]
