"""Whole runs over two ranks: with captured graphs they train what they train without, bit for bit."""

from __future__ import annotations

from functools import cache

import pytest

from megatron_run.config.request import Request
from tests.support.training import Seen, learned_the_same, train_many

pytestmark = pytest.mark.multiproc
LITTLE = ("train.sequence_length=16", "eval.batches=1", "model.dropout=0.1", "eval.interval=3")
#: Every tensor-parallel rank has all microbatches of a step, the others a share of them.
SHORT = ("train.steps=4", "model.num_layers=2")
SPLIT = (*SHORT, "parallel.tensor=2", "train.global_batch_size=4")
PIPELINE = ("train.steps=4",)
GROWING = ("train.steps=5", "train.ramp_up.start=4", "train.ramp_up.increment=4", "train.ramp_up.samples=8")
#: Name -> (plugins, settings, options of the capture).
RUNS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "interleaved": (("schedule=interleaved",), PIPELINE, "scope=attn,mlp,capture_after=2"),
    "interleaved, by slot": (("schedule=interleaved",), PIPELINE, "scope=attn,embedding,graph_reuse=per_slot"),
    "interleaved experts": (
        ("schedule=interleaved",),
        (*PIPELINE, "model.experts.count=4", "model.experts.top_k=2"),
        "scope=attn,moe_router,moe_preprocess",
    ),
    "experts of two ranks": (
        (),
        (
            *SHORT,
            "model.experts.count=4",
            "model.experts.top_k=2",
            "parallel.expert=2",
            "model.experts.router.bias_rate=0.05",
        ),
        "scope=attn,moe_router,moe_preprocess,moe_combine",
    ),
    "zero1": (("optimizer=zero1",), SHORT, "scope=embedding,attn,mlp,head"),
    "tensor": (("parallel-layer=tensor",), SPLIT, "scope=attn,mlp"),
    "sequence": (("parallel-layer=tensor",), (*SPLIT, "parallel.sequence=true"), "scope=embedding,attn,mlp,head"),
    "zero1, a growing batch": (
        ("optimizer=zero1",),
        ("model.num_layers=2", *GROWING),
        "scope=embedding,attn,mlp,head",
    ),
}


def request(name: str, *, captured: bool) -> Request:
    plugins, sets, options = RUNS[name]
    capture = (f"graph-capture=partial,{options}",) if captured else ()
    return Request(configs=("preset:tiny",), sets=(*LITTLE, *sets), plugins=(*plugins, *capture), nproc=2)


#: The other runs have their parts; test_graph_capture_partial reuses graphs by slot.
RARE = ("interleaved, by slot", "interleaved experts", "tensor", "zero1")
each_run = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in RARE)) for name in RUNS]
)


def trained(name: str) -> tuple[Seen, Seen]:
    """Rank 0 of a run, eager and captured."""
    return trained_with(name in RARE)[name]


@cache
def trained_with(rare: bool) -> dict[str, tuple[Seen, Seen]]:
    """The rare runs, or the others, on the same ranks."""
    names = [name for name in RUNS if (name in RARE) == rare]
    found = train_many(2, [request(name, captured=captured) for name in names for captured in (False, True)])
    return {name: (found[2 * index][0], found[2 * index + 1][0]) for index, name in enumerate(names)}


@each_run
def test_losses_norms_and_evaluations_are_those_of_the_run_without(name: str) -> None:
    """The gather of zero1, collectives within a region and overlapping reductions among them."""
    eager, captured = trained(name)
    assert len(eager.losses) >= 4
    learned_the_same(captured, eager)
    assert captured.captured


@each_run
def test_what_is_captured_is_what_was_planned(name: str) -> None:
    for said in trained(name)[1].captured:
        planned, made = said.planned, said.captured
        assert (made.regions, made.graphs, made.slots) == (planned.regions, planned.graphs, planned.slots)
        assert made.static_bytes
        assert made.pool_bytes


def test_graphs_are_captured_once_unless_the_batch_grows() -> None:
    assert [said.step for said in trained("interleaved")[1].captured] == [3]
    assert len(trained("zero1, a growing batch")[1].captured) > 1
