"""The executor over real gloo ranks: any legal schedule gives every stage its own messages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron_run.contracts import Boundary, ChunkOut, Microbatch
from megatron_run.contracts.schedule import Action
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.errors import PluginError
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.verify import verify
from megatron_run_engine.runtime.comm import create_groups
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_engine.runtime.messages import Messenger
from megatron_run_schedule_1f1b import OneForwardOneBackward
from tests.support.random_schedules import looped_spec, random_plan
from tests.support.ranks import run_ranks
from tests.support.toy_chunks import PairedChunk, ToyChunk, by_autograd
from tests.support.toy_stage import Bench, faults

CPU = torch.device("cpu")


def run_random_plans(rank: int, world: int, seeds: range) -> dict[tuple[int, int | None], list[str]]:
    """What is wrong after random plans, by seed and lookahead."""
    groups = create_groups(Topology(Sizes(pipeline=world), rank), timedelta(seconds=20))
    found = {}
    for seed, lookahead in product(seeds, (1, None)):
        plan = random_plan(seed)
        if rank < plan.stages:
            messenger = Messenger(groups.channels, range(world), CPU)
            found[seed, lookahead] = faults(plan, rank, messenger, lookahead, paired=seed % 2 == 1)
    return {case: wrong for case, wrong in found.items() if wrong}


@pytest.mark.multiproc
@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 400), marks=pytest.mark.nightly)], ids=str)
def test_random_legal_schedules_run_without_a_wrong_message(seeds: range) -> None:
    """Also with receives in the global order, as on NCCL."""
    assert run_ranks(run_random_plans, 4, seeds, timeout=280) == [{}, {}, {}, {}]


def forwards_then_backwards(microbatches: int, *, ops: str) -> Plan:
    """A plan of one stage: all forwards, then ``ops`` for each microbatch."""
    spec = looped_spec(1, 1, microbatches)
    forwards = [Action("F", m, 0) for m in range(microbatches)]
    return verify(spec, [forwards + [Action.parse(f"{op}{m}.0") for m in range(microbatches) for op in ops]])


def test_a_split_backward_gives_the_gradients_of_a_whole_one() -> None:
    for ops in ("B", "IW"):
        for paired in (False, True):
            plan = forwards_then_backwards(3, ops=ops)
            assert faults(plan, 0, Messenger(None, [0], CPU), paired=paired) == []


def test_a_recomputed_forward_gives_the_same_gradients_and_reports_its_loss_once() -> None:
    plan = forwards_then_backwards(3, ops="RB")
    assert faults(plan, 0, Messenger(None, [0], CPU)) == []  # its peak among them
    bench = Bench(plan, 0, Messenger(None, [0], CPU))
    bench.run()
    losses, weights, _ = by_autograd(1, 3)
    assert len(bench.losses) == 1 + 3
    assert sum(bench.losses) == pytest.approx(sum(losses), abs=1e-12)
    torch.testing.assert_close(main_grad(bench.chunks[0].weight), weights[0])


def test_a_recomputed_forward_of_a_later_chunk_begins_with_what_the_chunk_was_given() -> None:
    spec = looped_spec(1, 2, 2)
    forwards, backwards = "F0.0 F0.1 F1.0 F1.1", "R0.1 B0.1 R0.0 B0.0 R1.1 B1.1 R1.0 B1.0"
    plan = verify(spec, [[Action.parse(word) for word in f"{forwards} {backwards}".split()]])
    for paired in (False, True):
        assert faults(plan, 0, Messenger(None, [0], CPU), paired=paired) == []


def send_wrong(rank: int, world: int) -> str:
    groups = create_groups(Topology(Sizes(pipeline=world), rank), timedelta(seconds=20))
    spec = looped_spec(2, 1, 1)
    plan = verify(spec, [[Action("F", 0, 0), Action("B", 0, 0)]] * 2)
    if rank == 1:
        return ""  # the sender must notice, before anything is sent
    with pytest.raises(PluginError) as caught:
        Bench(plan, rank, Messenger(groups.channels, range(world), CPU)).run(lambda _: Boundary((2, 4), torch.float64))
    return str(caught.value)


@pytest.mark.multiproc
def test_a_wrong_shape_is_caught_by_the_sender_before_sending() -> None:
    message = run_ranks(send_wrong, 2)[0]
    assert "(2, 3) torch.float64, the model declared (2, 4) torch.float64" in message


def held_sends(rank: int, world: int, microbatches: int) -> int:
    """The most sent tensors that this stage holds at once, in 1F1B."""
    groups = create_groups(Topology(Sizes(pipeline=world), rank), timedelta(seconds=20))
    messenger, held = Messenger(groups.channels, range(world), CPU), [0]
    spec = looped_spec(world, 1, microbatches)
    bench = Bench(verify(spec, OneForwardOneBackward().actions(spec)), rank, messenger)
    send = messenger.send

    def watched(*arguments: Any) -> None:
        send(*arguments)
        held[0] = max(held[0], len(messenger._sent))

    cast("Any", messenger).send = watched
    bench.run()
    return held[0]


@pytest.mark.multiproc
def test_sent_tensors_are_released_during_the_step_and_not_at_its_end() -> None:
    """Each of two stages holds what the other may not have used yet: two tensors, for any number of microbatches."""
    assert run_ranks(held_sends, 2, 4) == run_ranks(held_sends, 2, 12) == [2, 2]


class Mute(ToyChunk):
    """Returns no output."""

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        return ChunkOut(None)


class Deaf(ToyChunk):
    """Does not look at its input."""

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        return super().forward(None, microbatch)


class Broken(ToyChunk):
    """Raises in its second forward."""

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        if microbatch.index == 1:
            raise ZeroDivisionError
        return super().forward(x, microbatch)


def raised_by(chunk: type[ToyChunk], boundary: Callable[[Microbatch], Boundary] | None = None) -> Exception:
    """What two microbatches raise on rank 0, which has both positions, as such chunks."""
    spec = looped_spec(1, 2, 2)
    words = "F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0"
    plan = verify(spec, [[Action.parse(word) for word in words.split()]])
    with pytest.raises(Exception) as caught:  # noqa: PT011  # which one is the caller's to say
        Bench(plan, 0, Messenger(None, [0], CPU), make_chunk=chunk).run(boundary)
    return caught.value


def test_a_chunk_that_hands_nothing_on_is_told_so_with_rank_and_action() -> None:
    for chunk, says in (
        (Mute, "the chunk returned no x (from rank 0, action 0, F0.0)"),
        (Deaf, "what the chunk returned does not depend on its input x (from rank 0, action 2, B0.1)"),
    ):
        error = raised_by(chunk)
        assert isinstance(error, PluginError)
        assert says in str(error)


def test_a_chunk_and_its_boundary_name_the_same_tensors_beside_x() -> None:
    beside = {"side": Boundary((5, 3), torch.float64)}
    error = raised_by(ToyChunk, lambda _: Boundary((2, 3), torch.float64, beside))
    assert isinstance(error, PluginError)
    assert "the chunk returned nothing beside x, and the model's boundary declares side" in str(error)
    error = raised_by(PairedChunk, lambda _: Boundary((2, 3), torch.float64, {"side": Boundary((4, 3), torch.float64)}))
    assert isinstance(error, PluginError)
    assert str(error).startswith("side beside the activation of microbatch 0")


def test_an_exception_in_a_chunk_carries_rank_and_action_as_a_note() -> None:
    error = raised_by(Broken)
    assert isinstance(error, ZeroDivisionError)
    assert error.__notes__ == ["rank 0, action 4, F1.0"]


def test_a_boundary_that_looks_at_the_fields_of_its_stage_fails_at_once() -> None:
    def boundary(microbatch: Microbatch) -> Boundary:
        return Boundary((len(microbatch.fields["tokens"]), 3), torch.float64)

    error = raised_by(ToyChunk, boundary)
    assert isinstance(error, KeyError)
    assert error.__notes__ == ["rank 0, action 0, F0.0"]
