"""Whole runs over two ranks: compiled, they train what they train without, bit for bit by eager operations."""

from __future__ import annotations

from functools import cache

import pytest

from megatron_run.config.request import Request
from tests.support.training import Seen, learned_the_same, train_many

pytestmark = pytest.mark.multiproc
SHORT = ("train.steps=3", "eval.interval=2")
LITTLE = (*SHORT, "train.sequence_length=16", "train.global_batch_size=4", "model.num_layers=2", "eval.batches=1")
EXPERTS = ("model.experts.count=4", "model.experts.top_k=2")
#: Name -> (plugins, settings, options of the capture).
RUNS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "interleaved, recomputed": (("schedule=interleaved",), (*SHORT, "train.recompute=full"), ""),
    "experts of two ranks": ((), (*SHORT, *EXPERTS, "parallel.expert=2"), ""),
    "tensor": (("parallel-layer=tensor",), (*SHORT, "parallel.tensor=2"), ",scope=attn,mlp,head,loss"),
    "sequence in bf16, recomputed": (
        ("parallel-layer=tensor", "optimizer=zero1"),
        (
            *LITTLE,
            "parallel.tensor=2",
            "parallel.sequence=true",
            "train.precision=bf16",
            "train.recompute=full",
        ),
        "",
    ),
}


def request(name: str, *, compiled: bool) -> Request:
    plugins, sets, options = RUNS[name]
    capture = (f"graph-capture=compile,backend=eager{options}",) if compiled else ()
    return Request(configs=("preset:tiny",), sets=(*sets, "model.dropout=0.1"), plugins=(*plugins, *capture), nproc=2)


#: The last splits, rounds and recomputes; test_graph_capture_compile compiles experts, head and loss in one process.
each_run = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name != list(RUNS)[-1])) for name in RUNS]
)


@cache
def trained(name: str) -> tuple[Seen, Seen]:
    """Rank 0 of a run, eager and compiled."""
    eager, compiled = train_many(2, [request(name, compiled=compiled) for compiled in (False, True)])
    return eager[0], compiled[0]


@each_run
def test_losses_norms_and_evaluations_are_those_of_the_run_without(name: str) -> None:
    """The collectives within a region, masks that ranks share, and layers that run again in the backward among them."""
    eager, compiled = trained(name)
    assert len(eager.losses) >= 3
    learned_the_same(compiled, eager)


@each_run
def test_what_is_compiled_is_what_was_planned(name: str) -> None:
    (said,) = trained(name)[1].captured
    assert said.captured.regions == said.planned.regions
    assert said.captured.graphs == said.planned.graphs
