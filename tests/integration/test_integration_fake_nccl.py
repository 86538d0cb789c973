"""Worlds of 8 to 64 ranks over NCCL, on paper: groups, shapes and orders of every rank's calls fit together."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from megatron_run.config.request import Request
from megatron_run.planning import resolve
from tests.integration.fake_nccl import Call, Seen, play, step_of

TINY = (
    "train.steps=1", "train.micro_batch_size=1", "train.sequence_length=16",
    "model.hidden_size=32", "model.num_heads=8", "eval.interval=0", "run.threads=1", "run.device=cpu",
    "observer.use=jsonl", "data.vocab_size=512",
)  # fmt: skip


class Case(NamedTuple):
    """A world and how it is split."""

    world: int
    sets: tuple[str, ...]
    plugins: tuple[str, ...]
    nightly: bool = True


DENSE = ("parallel-layer=tensor", "optimizer=zero1")
PIECES = ("parallel-layer=dense+context",)
LENT = "optimizer=zero3,whole_below=0"
EXPERTS = ("model.experts.count=8", "model.experts.top_k=2")
CASES = {
    "2 tensor, 2 stages, 2 data": Case(
        8, ("parallel.tensor=2", "parallel.pipeline=2"), (*DENSE, "schedule=1f1b"), nightly=False
    ),
    "8 data": Case(8, (), ("optimizer=zero1",), nightly=False),
    "sequence, 4 stages": Case(
        16, ("parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=4"), (*DENSE, "schedule=zero-bubble")
    ),
    "interleaved, shared messages": Case(
        16,
        ("parallel.tensor=2", "parallel.pipeline=2", "parallel.chunks=2", "parallel.scatter_messages=true"),
        (*DENSE, "schedule=interleaved"),
    ),
    "experts": Case(
        32, (*EXPERTS, "parallel.expert=4", "parallel.tensor=2", "parallel.pipeline=2"), (*DENSE, "schedule=1f1b")
    ),
    "64 ranks": Case(
        64, ("parallel.tensor=4", "parallel.pipeline=4", "parallel.sequence=true"), (*DENSE, "schedule=1f1b")
    ),
    "64 data, adamw": Case(64, (), ()),
    "4 of a sample, by ring": Case(8, ("parallel.context=4",), (*PIECES, "optimizer=zero1"), nightly=False),
    "64 ranks, 4 of a sample, gathered": Case(
        64,
        ("parallel.context=4", "parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"),
        ("parallel-layer=tensor+context,method=all_gather", "optimizer=zero1", "schedule=1f1b"),
    ),
    "64 ranks, 4 of a sample, exchanged": Case(
        64,
        (*EXPERTS, "parallel.expert=2", "parallel.context=4", "parallel.tensor=2", "parallel.pipeline=2"),
        ("parallel-layer=tensor+context,method=ulysses", "optimizer=zero1", "schedule=zero-bubble"),
    ),
    "8 data, lent": Case(8, (), (LENT,), nightly=False),
    "64 ranks, lent": Case(
        64,
        (*EXPERTS, "parallel.expert=4", "parallel.tensor=2", "parallel.pipeline=2", "train.recompute=full"),
        ("parallel-layer=tensor", LENT, "schedule=zero-bubble"),
    ),
}


def size(case: Case, axis: str) -> int:
    found = (each.partition("=") for each in case.sets)
    return next((int(value) for key, _, value in found if key == f"parallel.{axis}"), 1)


def ranks_of(case: Case) -> list[Seen]:
    data = case.world // (size(case, "tensor") * size(case, "pipeline") * size(case, "context"))
    sets = (*TINY, f"train.global_batch_size={4 * data}", *case.sets)
    run = resolve(Request(("preset:tiny",), sets=sets, plugins=case.plugins, nproc=case.world))
    return [step_of(rank, case.world, run) for rank in range(case.world)]


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if case.nightly else ()) for name, case in CASES.items()]
)
def test_what_all_ranks_call_fits_together(name: str) -> None:
    case = CASES[name]
    ranks = ranks_of(case)
    assert {tuple(seen.made) for seen in ranks} == {tuple(ranks[0].made)}, "NCCL splits communicators with all ranks"
    played = play(ranks)
    assert (played["message"] > 0) == (size(case, "pipeline") > 1)
    if {"optimizer=zero1", LENT} & {*case.plugins}:
        assert any(operation.startswith("reduce_scatter") for operation in played)
        assert any(operation.startswith("all_gather") for operation in played)


def both(first: list[Call], second: list[Call]) -> list[Seen]:
    return [Seen(calls={((0, 1), 0): first}), Seen(calls={((0, 1), 0): second})]


def test_calls_that_do_not_fit_are_found() -> None:
    total, send, receive = Call("all_reduce", 4, "f"), Call("isend", 4, "f", 1), Call("irecv", 4, "f", 0)
    assert play(both([total, send], [total, receive])) == {"all_reduce": 1, "message": 1}
    with pytest.raises(AssertionError, match="wait for ever"):
        play(both([send, total], [total, receive]))
    with pytest.raises(AssertionError, match="wait for ever"):
        play(both([total], [total, total]))
    with pytest.raises(AssertionError, match="all_reduce"):
        play(both([total], [total._replace(values=8)]))
    with pytest.raises(AssertionError, match="expects"):
        play(both([send], [receive._replace(values=8)]))
