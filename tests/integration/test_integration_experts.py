"""Experts split over ranks train as the single process does, whatever else the run is split by.

Here each two choices run together once, for few steps; ``make grid`` runs every split.
"""

from __future__ import annotations

import re
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
    "train.global_batch_size=4",
    "train.micro_batch_size=1",  # the same everywhere: balance and capacity are those of a microbatch
    "train.lr_shape=constant",
    "train.lr_warmup=2",
    f"eval.interval={STEPS}",
    "eval.batches=1",
    "model.experts=4",
    "model.expert_ffn_size=32",
    "model.hidden_size=32",
    "model.num_heads=4",
    "train.sequence_length=16",
)
#: Each stage has a layer with experts, by every schedule.
MODELS: dict[str, tuple[str, ...]] = {
    "dropless": ("model.z_loss_coeff=0.01", "model.expert_layer_pattern=1,0,0,1"),
    "capacity": (
        "model.expert_capacity_factor=0.75",
        "model.shared_expert_ffn_size=24",
        "model.shared_expert_gate=true",
        "model.activation=swiglu",
    ),
    "biases": (
        "model.aux_loss_coeff=0",
        "model.router_bias_rate=0.05",
        "model.router_score_function=sigmoid",
        "model.router_groups=2",
        "model.router_topk_scaling_factor=1.5",
        "model.expert_layer_pattern=1,0,0,1",
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

    def case(self) -> Case:
        sizes = [f"parallel.{axis}={getattr(self, axis)}" for axis in ("expert", "tensor", "pipeline")]
        chunks = ["parallel.chunks=2"] * (self.schedule == "interleaved")
        ways = [f"parallel.sequence={str(self.sequence).lower()}", f"model.token_dispatcher={self.dispatcher}"]
        steps = [
            f"train.recompute={self.recompute}",
            f"train.steps={1 if WHOLE and self.dtype == 'float64' else STEPS}",
        ]
        layers = ["parallel-layer=tensor"] * (self.tensor > 1)
        schedule = [f"schedule={self.schedule}"] * (self.pipeline > 1)
        sets = (*SETS, *MODELS[self.model], *sizes, *chunks, *ways, *steps)
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
SPLITS = chosen(PRODUCT, lambda split: {**split._asdict(), "shape": split[1:4]})
#: With zero1 a rank has whole gradients of its share alone.
EXACT = [split for split in SPLITS if split.optimizer != "zero1"]
each_split = pytest.mark.parametrize("split", SPLITS, ids=str)


def _reference(split: Split) -> Split:
    return Split(split.model, dtype=split.dtype)


def _exact(split: Split) -> Split:
    return split._replace(dtype="float64")


def _tried(split: Split) -> Split:
    """What is read of ``split``: with whole gradients its run in float64, but in ``make grid`` that in fp32."""
    return split if WHOLE or split not in EXACT else _exact(split)


@cache
def ran() -> dict[Split, list[Ran]]:
    """What each rank saw of every split; in ``make grid`` those with whole gradients run in both types."""
    splits = list(dict.fromkeys([*map(_tried, SPLITS), *map(_exact, EXACT)]))
    return dict(zip(splits, run_cases(RANKS, [split.case() for split in splits]), strict=True))


@cache
def alone() -> dict[Split, Ran]:
    """The same models in one process."""
    references = list(dict.fromkeys(map(_reference, ran())))
    found = run_cases(1, [each.case() for each in references])
    return dict(zip(references, (ranks[0] for ranks in found), strict=True))


@each_split
def test_a_split_gives_the_losses_of_the_single_process(split: Split) -> None:
    tried = _tried(split)
    seen, single = ran()[tried][0].seen, alone()[_reference(tried)].seen
    assert len(seen.losses) == STEPS
    np.testing.assert_allclose(seen.losses, single.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(seen.norms, single.norms, rtol=1e-4)
    np.testing.assert_allclose(seen.validation, single.validation, rtol=0, atol=1e-5)


@pytest.mark.parametrize("split", EXACT, ids=str)
def test_every_gradient_is_that_of_the_single_process(split: Split) -> None:
    exact = _exact(split)
    here, single = joined(ran()[exact]), joined([alone()[_reference(exact)]])
    assert here.keys() == single.keys()
    for name, gradient in single.items():
        assert gradient.any() or "bias" in name, name
        np.testing.assert_allclose(here[name], gradient, rtol=1e-9, atol=1e-12, err_msg=name)


@each_split
def test_each_rank_holds_its_share_of_the_experts(split: Split) -> None:
    for rank, seen in enumerate(ran()[_tried(split)]):
        names = (re.search(r"experts\.input\.(\d+)", piece.name) for piece in seen.pieces)
        place, share = rank // split.tensor % split.expert, 4 // split.expert
        assert {int(name[1]) for name in names if name} == set(range(place * share, (place + 1) * share))
