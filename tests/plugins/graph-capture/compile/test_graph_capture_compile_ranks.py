"""Whole runs over two ranks: compiled, they train what they train without, bit for bit by eager operations."""

from __future__ import annotations

import pytest

from megatron_run.config.request import Request
from tests.support.training import Seen, train_many

pytestmark = pytest.mark.multiproc
SHORT = ("train.steps=3", "eval.interval=2")
EXPERTS = ("model.experts=4", "model.top_k=2")
#: Name -> (plugins, settings, options of the capture).
RUNS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "interleaved, recomputed": (("schedule=interleaved",), (*SHORT, "train.recompute=full"), ""),
    "experts of two ranks": ((), (*SHORT, *EXPERTS, "parallel.expert=2"), ""),
    "tensor": (("parallel-layer=tensor",), (*SHORT, "parallel.tensor=2"), ",scope=attn,mlp,head,loss"),
    "sequence in bf16, recomputed": (
        ("parallel-layer=tensor", "optimizer=zero1"),
        (*SHORT, "parallel.tensor=2", "parallel.sequence=true", "train.precision=bf16", "train.recompute=full"),
        "",
    ),
}


def request(name: str, *, compiled: bool) -> Request:
    plugins, sets, options = RUNS[name]
    capture = (f"graph-capture=compile,backend=eager{options}",) if compiled else ()
    return Request(configs=("preset:tiny",), sets=(*sets, "model.dropout=0.1"), plugins=(*plugins, *capture), nproc=2)


@pytest.fixture(scope="module")
def trained() -> dict[tuple[str, bool], Seen]:
    """Rank 0 of every run, eager and compiled, in one pair of processes."""
    cases = [(name, compiled) for name in RUNS for compiled in (False, True)]
    found = train_many(2, [request(name, compiled=compiled) for name, compiled in cases])
    return {case: ranks[0] for case, ranks in zip(cases, found, strict=True)}


@pytest.mark.parametrize("name", RUNS)
def test_losses_norms_and_evaluations_are_those_of_the_run_without(
    name: str, trained: dict[tuple[str, bool], Seen]
) -> None:
    """The collectives within a region, masks that ranks share, and layers that run again in the backward among them."""
    eager, compiled = trained[name, False], trained[name, True]
    assert len(eager.losses) >= 3
    assert compiled.losses == eager.losses
    assert compiled.norms == eager.norms
    assert compiled.validation == eager.validation


@pytest.mark.parametrize("name", RUNS)
def test_what_is_compiled_is_what_was_planned(name: str, trained: dict[tuple[str, bool], Seen]) -> None:
    (said,) = trained[name, True].captured
    assert said.captured.regions == said.planned.regions
    assert said.captured.graphs == said.planned.graphs
