"""Layers split over ranks train as the single process does, whatever else the run is split by.

Here each choice of ``FEW`` runs, and some pairs, for few steps; ``make grid`` runs every split.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest

from tests.integration.pairwise import WHOLE, chosen
from tests.integration.pieces import Array, Case, Ran, joined, run_cases

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(3600 if WHOLE else 600)]

EACH, BATCH = 5 if WHOLE else 2, 8
STEPS = 20 if WHOLE else EACH
SETS = (
    f"train.global_batch_size={BATCH}",
    "train.lr_shape=constant",
    "train.lr_warmup=2",
    f"eval.interval={EACH}",
    "eval.batches=1",
)
#: The vocabulary leaves some ranks with little but padding, or with nothing else.
MODELS: dict[str, tuple[str, ...]] = {
    "gpt2": ("model.num_heads=4", "data.vocab_size=130"),
    "untied": ("model.num_heads=4", "data.vocab_size=130", "model.tie_embeddings=false"),
    "llama": (
        "model.num_heads=8",
        "model.num_kv_heads=4",
        "model.position=rope",
        "model.norm.kind=rmsnorm",
        "model.activation=swiglu",
        "model.ffn_size=88",
        "model.bias=false",
        "model.tie_embeddings=false",
        "model.label_smoothing=0.1",
        "data.vocab_size=101",
    ),
}


class Split(NamedTuple):
    """How many ways a model is split along each axis, and by what."""

    model: str
    tensor: int
    pipeline: int = 1
    data: int = 1
    sequence: bool = False
    schedule: str = "1f1b"

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def case(self) -> Case:
        sizes = {axis: getattr(self, axis) for axis in ("tensor", "pipeline", "data")}
        sets = [f"parallel.{axis}={size}" for axis, size in sizes.items()]
        sets += [f"parallel.sequence={str(self.sequence).lower()}", f"train.steps={STEPS}"]
        microbatches = 2 * self.pipeline if WHOLE else 2
        sets += [f"train.micro_batch_size={BATCH // self.data // microbatches}"]
        plugins = ("parallel-layer=tensor", *[f"schedule={self.schedule}"] * (self.pipeline > 1))
        return Case((*SETS, *MODELS[self.model], *sets), plugins)

    def __str__(self) -> str:
        parts = [self.model, f"t{self.tensor}-p{self.pipeline}-d{self.data}"]
        return "-".join(parts + [self.schedule] * (self.pipeline > 1) + ["sequence"] * self.sequence)


SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zero-bubble,variant=v")
#: Every split of up to four ranks, by every schedule.
PRODUCT = [
    Split(*each)
    for each in product(MODELS, (1, 2, 4), (1, 2), (1, 2), (False, True), SCHEDULES)
    if Split(*each).world <= 4
    and not (each[4] and each[1] == 1)  # tensor-parallel ranks share a sequence
    and (each[2] > 1 or each[5] == SCHEDULES[0])  # without a pipeline there is no choice of a schedule
]
#: What is tried of: llama's embeddings are untied too, and the grid has gpipe, zero-bubble's other variant, and splits
#: of no layer.
FEW = [
    split
    for split in PRODUCT
    if split.model != "untied" and split.schedule not in ("gpipe", "zero-bubble") and split.tensor > 1
]
SPLITS = chosen(PRODUCT if WHOLE else FEW, Split._asdict, ("model", "sequence"))
each_split = pytest.mark.parametrize("split", SPLITS, ids=str)


@cache
def ran(world: int) -> dict[Split, list[Ran]]:
    """Every split of ``world``: what each rank saw."""
    splits = [split for split in SPLITS if split.world == world]
    return dict(zip(splits, run_cases(world, [split.case for split in splits]), strict=True))


@cache
def alone() -> dict[tuple[str, str], Ran]:
    """Each model on dense layers in one process: in fp32 and, for one step, in float64."""
    cases = {
        (model, dtype): Case((*SETS, *sets, f"train.steps={steps}"), dtype=dtype)
        for model, sets in MODELS.items()
        if any(split.model == model for split in SPLITS)
        for dtype, steps in (("float32", STEPS), ("float64", 1))
    }
    return {name: ranks[0] for name, ranks in zip(cases, run_cases(1, list(cases.values())), strict=True)}


@each_split
def test_a_split_gives_the_losses_of_the_single_process(split: Split) -> None:
    seen, single = ran(split.world)[split][0].seen, alone()[split.model, "float32"].seen
    assert len(seen.losses) == STEPS
    assert len(seen.validation) == STEPS // EACH
    np.testing.assert_allclose(seen.losses, single.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(seen.norms, single.norms, rtol=1e-4)
    np.testing.assert_allclose(seen.validation, single.validation, rtol=0, atol=1e-5)


@each_split
def test_first_gradients_err_at_most_twice_as_much_as_those_of_the_single_process(split: Split) -> None:
    single = ([alone()[split.model, dtype]] for dtype in ("float64", "float32"))
    exact, dense, here = (joined(ranks) for ranks in (*single, ran(split.world)[split]))
    assert here.keys() == dense.keys() == exact.keys()
    allowed = {tensor: 2 * error(dense[tensor], exact[tensor]) for tensor in exact}
    found = {tensor: error(here[tensor], exact[tensor]) for tensor in exact}
    assert {tensor: (found[tensor], allowed[tensor]) for tensor in exact if found[tensor] > allowed[tensor]} == {}


def error(gradient: Array, exact: Array) -> float:
    return float(np.linalg.norm(gradient.astype(np.float64) - exact))


@each_split
def test_what_ran_is_what_was_planned(split: Split) -> None:
    for rank in ran(split.world)[split]:
        assert len(rank.seen.executed) == STEPS
        assert all(executed == rank.seen.planned for executed in rank.seen.executed)
        assert set(rank.seen.peaks) == {rank.seen.plan.peak_in_flight[rank.seen.stage]}
        assert set(rank.seen.left) == {0}
