"""Experts split over ranks train as the single process does, whatever else the run is split by.

Here each choice of ``FEW`` runs, and some pairs, for few steps of a small batch; ``make grid`` runs every split.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest

from tests.integration.pairwise import WHOLE, chosen
from tests.integration.pieces import Case, Ran, joined, run_cases

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(3600 if WHOLE else 600)]

STEPS, RANKS = 20 if WHOLE else 2, 4
SETS = (
    "train.micro_batch_size=1",  # the same everywhere: balance and capacity are those of a microbatch
    "train.lr_shape=constant",
    "train.lr_warmup=2",
    f"eval.interval={STEPS}",
    "eval.batches=1",
    "model.experts.count=4",
    "model.experts.ffn_size=32",
    "model.hidden_size=32",
    "model.num_heads=4",
    "train.sequence_length=16",
)
#: Those with dense layers too.
MIXED = ("dropless", "biases")
MODELS: dict[str, tuple[str, ...]] = {
    "dropless": ("model.experts.z_loss_coeff=0.01",),
    "capacity": (
        "model.experts.z_loss_coeff=0.01",
        "model.experts.capacity_factor=0.75",
        "model.experts.shared.ffn_size=24",
        "model.experts.shared.gate=true",
        "model.activation=swiglu",
    ),
    "biases": (
        "model.experts.aux_loss_coeff=0",
        "model.experts.router.bias_rate=0.05",
        "model.experts.router.score_function=sigmoid",
        "model.experts.router.groups=2",
        "model.experts.router.scaling_factor=1.5",
    ),
}


class Split(NamedTuple):
    """How many ways a model is split along each axis, and by what; data-parallel ranks are what is left of four."""

    model: str
    expert: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False
    dispatcher: str = "alltoall"
    recompute: str = "none"
    optimizer: str = "adamw"
    schedule: str = "1f1b"
    dtype: str = "float32"
    pattern: str = "1,0,0,1"  # 1 for a layer with experts: each stage has one, by every schedule
    batch: int = 4

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.expert, self.tensor, self.pipeline

    @property
    def axes(self) -> dict[str, Hashable]:
        """What it chooses: some split that runs has each of these."""
        names = ("model", "shape", "sequence", "dispatcher", "recompute", "optimizer", "schedule")
        return {name: getattr(self, name) for name in names}

    def small(self) -> Split:
        """With a layer for each place, two without a pipeline, and at most two microbatches on a rank."""
        pattern = "1,0" if self.pipeline == 1 else "1,0,0,1" if self.schedule == "interleaved" else "1,1"
        return self._replace(pattern=pattern, batch=2 if self.expert == 1 else 4)

    def case(self) -> Case:
        sizes = [f"parallel.{axis}={getattr(self, axis)}" for axis in ("expert", "tensor", "pipeline")]
        chunks = ["parallel.chunks=2"] * (self.schedule == "interleaved")
        ways = [f"parallel.sequence={str(self.sequence).lower()}", f"model.experts.dispatcher={self.dispatcher}"]
        steps = [
            f"train.recompute={self.recompute}",
            f"train.steps={1 if WHOLE and self.dtype == 'float64' else STEPS}",
        ]
        layers = ["parallel-layer=tensor"] * (self.tensor > 1)
        schedule = [f"schedule={self.schedule}"] * (self.pipeline > 1)
        size = [f"model.num_layers={len(self.pattern.split(','))}", f"train.global_batch_size={self.batch}"]
        size += [f"model.experts.layer_pattern={self.pattern}"] * (self.model in MIXED)
        sets = (*SETS, *MODELS[self.model], *size, *sizes, *chunks, *ways, *steps)
        return Case(sets, (f"optimizer={self.optimizer}", *layers, *schedule), self.dtype)

    def __str__(self) -> str:
        ways = ["sequence"] * self.sequence + [self.dispatcher, self.recompute, self.optimizer]
        return "-".join([self.model, f"e{self.expert}-t{self.tensor}-p{self.pipeline}", *ways, self.schedule])


#: (expert, tensor, pipeline) of four ranks that split experts or their layers.
SHAPES = ((4, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2))
SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
PRODUCT = [
    Split(model, *shape, sequence, dispatcher, recompute, optimizer, schedule)
    for model, shape, sequence, dispatcher, recompute, optimizer, schedule in product(
        MODELS,
        SHAPES,
        (False, True),
        ("alltoall", "allgather"),
        ("none", "full", "moe_dispatch,moe_experts"),
        ("adamw", "zero1"),
        SCHEDULES,
    )
    if (shape[1] > 1 or not sequence)  # tensor-parallel ranks share a sequence
    and (shape[0] > 1 or dispatcher == "alltoall")  # without expert-parallel ranks nothing is dispatched
    and (shape[2] > 1 or schedule == SCHEDULES[0])  # without a pipeline there is no choice of a schedule
]
#: By shape, or by schedule where there is one, the recomputation that is tried beside none.
RECOMPUTED = {
    (4, 1, 1): "full",
    (2, 1, 1): "moe_dispatch,moe_experts",
    (2, 2, 1): "moe_dispatch,moe_experts",
    (1, 4, 1): "full",
    "interleaved": "full",
    "zero-bubble": "moe_dispatch,moe_experts",
}
#: What is tried of: ``capacity`` has the losses of ``dropless`` too, ``biases`` drops no token either, and
#: ``test_integration_loss_mean`` has experts under 1f1b.
FEW = [
    split.small()
    for split in PRODUCT
    if split.model != "dropless"
    and (split.pipeline == 1 or split.schedule != SCHEDULES[0])
    and split.recompute in ("none", RECOMPUTED[split.shape if split.pipeline == 1 else split.schedule])
]
SPLITS = chosen(PRODUCT if WHOLE else FEW, lambda split: split.axes, ("model", "schedule", "optimizer"))
#: With zero1 a rank has whole gradients of its share alone.
EXACT = [split for split in SPLITS if split.optimizer != "zero1"]
each_split = pytest.mark.parametrize("split", SPLITS, ids=str)


def _reference(split: Split) -> Split:
    return Split(split.model, dtype=split.dtype, pattern=split.pattern, batch=split.batch)


def _exact(split: Split) -> Split:
    return split._replace(dtype="float64")


def _tried(split: Split) -> Split:
    """What is read of ``split``: with whole gradients its run in float64, but in ``make grid`` that in fp32."""
    return split if WHOLE or split not in EXACT else _exact(split)


@cache
def ran(model: str) -> dict[Split, list[Ran]]:
    """What each rank saw of every split of ``model``; in ``make grid`` those with whole gradients run in both types.

    One model at a time: the whole product trains for an hour, and its tests should say something before that.
    """
    splits = list(dict.fromkeys([*map(_tried, SPLITS), *map(_exact, EXACT)]))
    splits = [split for split in splits if split.model == model]
    return dict(zip(splits, run_cases(RANKS, [split.case() for split in splits]), strict=True))


@cache
def alone(model: str) -> dict[Split, Ran]:
    """The same model in one process."""
    references = list(dict.fromkeys(map(_reference, ran(model))))
    found = run_cases(1, [each.case() for each in references])
    return dict(zip(references, (ranks[0] for ranks in found), strict=True))


@each_split
def test_a_split_gives_the_losses_of_the_single_process(split: Split) -> None:
    tried = _tried(split)
    seen, single = ran(split.model)[tried][0].seen, alone(split.model)[_reference(tried)].seen
    assert len(seen.losses) == STEPS
    np.testing.assert_allclose(seen.losses, single.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(seen.norms, single.norms, rtol=1e-4)
    np.testing.assert_allclose(seen.validation, single.validation, rtol=0, atol=1e-5)


@pytest.mark.parametrize("split", EXACT, ids=str)
def test_every_gradient_is_that_of_the_single_process(split: Split) -> None:
    exact = _exact(split)
    here = joined(ran(split.model)[exact])
    single = joined([alone(split.model)[_reference(exact)]])
    assert here.keys() == single.keys()
    for name, gradient in single.items():
        assert gradient.any() or "bias" in name, name
        np.testing.assert_allclose(here[name], gradient, rtol=1e-9, atol=1e-12, err_msg=name)


@each_split
def test_each_rank_holds_its_share_of_the_experts(split: Split) -> None:
    for rank, seen in enumerate(ran(split.model)[_tried(split)]):
        names = (re.search(r"experts\.input\.(\d+)", piece.name) for piece in seen.pieces)
        place, share = rank // split.tensor % split.expert, 4 // split.expert
        assert {int(name[1]) for name in names if name} == set(range(place * share, (place + 1) * share))
