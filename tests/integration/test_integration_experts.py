"""Experts split over ranks train as the single process does, whatever else the run is split by."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from tests.support.pieces import Case, Ran, joined, run_cases

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

STEPS, RANKS = 20, 4
SETS = (
    "train.global_batch_size=8",
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
MODELS: dict[str, tuple[str, ...]] = {
    "dropless": ("model.z_loss_coeff=0.01", "model.expert_layer_pattern=0,1"),
    "capacity": (
        "model.expert_capacity_factor=0.75",
        "model.shared_expert_ffn_size=24",
        "model.shared_expert_gate=true",
        "model.activation=swiglu",
    ),
}


class Split(NamedTuple):
    """How many ways a model is split along each axis, and by what; data-parallel ranks are what is left of four."""

    model: str
    expert: int = 1
    tensor: int = 1
    pipeline: int = 1
    sets: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    dtype: str = "float32"

    def case(self) -> Case:
        sizes = [f"parallel.{axis}={getattr(self, axis)}" for axis in ("expert", "tensor", "pipeline")]
        layers = ("parallel-layer=tensor",) * (self.tensor > 1)
        schedule = ("schedule=1f1b",) * (self.pipeline > 1 and not any("schedule" in each for each in self.plugins))
        steps = STEPS if self.dtype == "float32" else 1
        sets = (*SETS, *MODELS[self.model], *sizes, *self.sets, f"train.steps={steps}")
        return Case(sets, (*self.plugins, *layers, *schedule), self.dtype)

    def __str__(self) -> str:
        return "-".join([self.model, f"e{self.expert}-t{self.tensor}-p{self.pipeline}", *self.sets, *self.plugins])


SEQUENCE, GATHER = "parallel.sequence=true", "model.token_dispatcher=allgather"
TABLE = [
    Split("dropless", 4),
    Split("dropless", 2, plugins=("optimizer=zero1",)),
    Split("dropless", 2, tensor=2, sets=(SEQUENCE,)),
    Split("dropless", 2, pipeline=2, sets=("train.recompute=full",)),
    Split("dropless", 4, sets=(GATHER,)),
    Split("dropless", 2, pipeline=2, plugins=("schedule=zero-bubble",)),
    Split("capacity", 4, plugins=("optimizer=zero1",)),
    Split("capacity", 2, tensor=2),
    Split(
        "capacity",
        2,
        pipeline=2,
        sets=(GATHER, "parallel.chunks=2"),
        plugins=("schedule=interleaved",),
    ),
    Split("capacity", 1, tensor=4, sets=(SEQUENCE,)),
    Split("capacity", 2, tensor=2, sets=(SEQUENCE, GATHER), plugins=("optimizer=zero1",)),
]
#: With zero1 a rank has whole gradients of its share alone.
WHOLE = [split for split in TABLE if "optimizer=zero1" not in split.plugins]
each_split = pytest.mark.parametrize("split", TABLE, ids=str)


def _reference(split: Split) -> Split:
    return Split(split.model, dtype=split.dtype)


def _exact(split: Split) -> Split:
    return split._replace(dtype="float64")


@cache
def ran() -> dict[Split, list[Ran]]:
    """What each rank saw of every split in fp32 and, for one step, of those with whole gradients in float64."""
    splits = [*TABLE, *map(_exact, WHOLE)]
    return dict(zip(splits, run_cases(RANKS, [split.case() for split in splits]), strict=True))


@cache
def alone() -> dict[Split, Ran]:
    """The same models in one process."""
    references = list(dict.fromkeys(map(_reference, ran())))
    found = run_cases(1, [each.case() for each in references])
    return dict(zip(references, (ranks[0] for ranks in found), strict=True))


@each_split
def test_a_split_gives_the_losses_of_the_single_process(split: Split) -> None:
    seen, single = ran()[split][0].seen, alone()[_reference(split)].seen
    assert len(seen.losses) == STEPS
    np.testing.assert_allclose(seen.losses, single.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(seen.norms, single.norms, rtol=1e-4)
    np.testing.assert_allclose(seen.validation, single.validation, rtol=0, atol=1e-5)


@pytest.mark.parametrize("split", WHOLE, ids=str)
def test_every_gradient_is_that_of_the_single_process(split: Split) -> None:
    exact = _exact(split)
    here, single = joined(ran()[exact]), joined([alone()[_reference(exact)]])
    assert here.keys() == single.keys()
    for name, gradient in single.items():
        assert gradient.any() or "bias" in name, name
        np.testing.assert_allclose(here[name], gradient, rtol=1e-9, atol=1e-12, err_msg=name)


@each_split
def test_each_rank_holds_its_share_of_the_experts(split: Split) -> None:
    for rank, seen in enumerate(ran()[split]):
        names = (re.search(r"experts\.input\.(\d+)", piece.name) for piece in seen.pieces)
        place, share = rank // split.tensor % split.expert, 4 // split.expert
        assert {int(name[1]) for name in names if name} == set(range(place * share, (place + 1) * share))
