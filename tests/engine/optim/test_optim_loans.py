"""Which segments are whole when, whose memory is taken back, and what happens to who reads it then."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_run.contracts import Init, ParamInfo, Part
from megatron_run_engine.optim.buckets import build_buckets
from megatron_run_engine.optim.loans import LentShard, LentValues, Room
from megatron_run_engine.optim.units import LentGradients, LentParameters, Unit, most_lent, units_of
from megatron_run_engine.runtime.comm import Pending
from megatron_run_engine.runtime.gates import gated, in_backward
from megatron_run_engine.runtime.gradients import main_grad

#: Values of each parameter: of a whole bucket, without padding.
SIZE = 64


def described(index: int) -> dict[Parameter, ParamInfo]:
    parameter = Parameter(torch.full((SIZE,), float(index)))
    name = f"layer{index}"
    return {parameter: ParamInfo(name, (Part(name, (SIZE,), range(SIZE)),), Init("zeros"), decay=True)}


class Segments:
    """Four segments with a parameter each, and what is gathered and reduced of them, in order."""

    def __init__(self, held: int = 2) -> None:
        self.events: list[str] = []
        infos = [described(index) for index in range(4)]
        self.parameters = [next(iter(each)) for each in infos]
        self.units = []
        for place, each in enumerate(infos):
            (bucket,) = build_buckets([each], 2, lent=True)
            every = range(len(bucket.grad))
            shard = LentShard(bucket, every, every, torch.float32, Room(len(every), bucket.grad, torch.float32))
            shard.initialise(0)
            self.units.append(Unit(0, place, (shard,)))
        self.lent = LentParameters(self.units, lambda lent: self._note("gather", lent, lent.values), held)
        self.gradients = LentGradients(
            self.units, lambda shard: self._note("reduce", shard, shard.bucket.grad), each_microbatch=True
        )

    def _note(self, what: str, part: LentShard | LentValues, filled: Tensor) -> Pending:
        place = next(unit.place for unit in self.units if part in (*unit.shards, *unit.lent))
        self.events.append(f"{what} {place}")
        return Pending(filled)

    def use(self, index: int) -> None:
        """As a segment's forward does."""
        self.lent.take([self.parameters[index]])
        assert float(self.parameters[index].detach()[0]) == index
        self.lent.give_back([self.parameters[index]])

    def taken(self) -> list[str]:
        """What happened since the last call."""
        found = self.events[:]
        self.events.clear()
        return found

    @property
    def whole(self) -> list[int]:
        return [unit.place for unit in self.units if unit.shards[0].values.untyped_storage().nbytes()]


def test_the_next_segment_comes_while_one_runs_and_only_two_are_whole() -> None:
    segments = Segments()
    assert segments.whole == []
    for index, gathered in enumerate((["gather 0", "gather 1"], ["gather 2"], ["gather 3"], [])):
        segments.use(index)
        assert segments.taken() == gathered
        assert len(segments.whole) == 2


def test_a_backward_begins_with_what_the_forward_has_ended_with() -> None:
    segments = Segments()
    for parameter in segments.parameters:
        parameter.requires_grad_(False)
    x = start = torch.ones(SIZE, requires_grad=True)
    for parameter in segments.parameters:
        take, give_back = partial(segments.lent.take, [parameter]), partial(segments.lent.give_back, [parameter])
        take()
        x = gated(partial(torch.mul, parameter), (x,), take, give_back)
        give_back()
    segments.taken()
    x.sum().backward()
    assert segments.taken() == ["gather 1", "gather 0"]  # 3 and 2 were whole
    assert start.grad is not None
    assert start.grad.tolist() == [0.0] * SIZE  # the product of 0, 1, 2 and 3


def test_more_segments_are_held_and_come_ahead() -> None:
    segments = Segments(held=3)
    segments.use(0)
    assert segments.taken() == ["gather 0", "gather 1", "gather 2"]
    segments.use(1)
    assert segments.taken() == ["gather 3"]
    assert segments.whole == [1, 2, 3]


def test_without_a_bound_all_that_was_read_stays_until_the_update() -> None:
    segments = Segments(held=0)
    for index in (0, 1, 2, 3, 0, 1):
        segments.use(index)
    assert segments.taken() == [f"gather {index}" for index in range(4)]
    segments.lent.forget()
    assert segments.whole == []
    segments.use(2)
    assert segments.taken() == ["gather 2", "gather 3"]


def test_what_was_gathered_before_an_update_is_gathered_again() -> None:
    segments = Segments()
    segments.use(0)
    segments.units[0].shards[0].masters.fill_(0.0)
    segments.lent.forget()
    segments.use(0)  # looks at the value
    assert segments.taken() == ["gather 0", "gather 1"] * 2


def test_one_that_is_read_never_makes_room() -> None:
    segments = Segments()
    segments.lent.take(segments.parameters[:3])
    assert {0, 1, 2} <= {*segments.whole}
    segments.lent.give_back(segments.parameters[:3])
    segments.use(3)
    assert len(segments.whole) <= 2


def test_what_is_read_alone_brings_no_neighbour_and_makes_room_for_one() -> None:
    segments = Segments()
    segments.use(0)
    segments.use(1)
    segments.events.clear()
    segments.lent.take([segments.parameters[3]], ahead=False)
    segments.lent.give_back([segments.parameters[3]])
    segments.lent.take([segments.parameters[0]], ahead=False)
    assert segments.events == ["gather 3", "gather 0"]


def test_who_reads_a_parameter_that_is_away_reads_no_number() -> None:
    segments = Segments()
    segments.use(0)
    segments.lent.forget()
    assert torch.isnan(segments.parameters[0].detach() * 1).all()


def test_who_adds_to_a_gradient_that_is_away_gets_an_error() -> None:
    segments = Segments()
    segments.gradients.begin([segments.parameters[0]])
    segments.gradients.finish()
    with pytest.raises(RuntimeError, match="single memory location"):
        main_grad(segments.parameters[0]).add_(torch.ones(SIZE))


def test_a_view_that_a_backward_has_saved_gets_its_values_again() -> None:
    segments = Segments()
    segments.lent.take([segments.parameters[1]])
    saved = segments.parameters[1].detach()[8:16]
    segments.lent.forget()
    assert segments.whole == []
    segments.lent.give_back([segments.parameters[1]])
    segments.use(1)
    assert saved.tolist() == [1.0] * 8


def test_gradients_leave_when_those_of_the_next_segment_begin() -> None:
    segments = Segments()
    for index in (3, 2, 1):
        segments.gradients.begin([segments.parameters[index]])
        assert not main_grad(segments.parameters[index]).any()
        main_grad(segments.parameters[index]).add_(index)
    assert segments.taken() == ["reduce 3", "reduce 2"]
    held = [unit.place for unit in segments.units if unit.shards[0].bucket.grad.untyped_storage().nbytes()]
    assert held == [1, 2]  # one that is added to, one that leaves
    segments.gradients.finish()
    assert segments.taken() == ["reduce 1"]
    assert [float(unit.shards[0].reduced[0]) for unit in segments.units] == [0, 1, 2, 3]
    assert not any(unit.shards[0].bucket.grad.untyped_storage().nbytes() for unit in segments.units)


def test_microbatches_add_up_in_the_share() -> None:
    segments = Segments()
    for _ in range(3):
        for index in (1, 0):
            segments.gradients.begin([segments.parameters[index]])
            main_grad(segments.parameters[index]).add_(2.0)
    segments.gradients.finish()
    assert [float(unit.shards[0].reduced[0]) for unit in segments.units] == [6, 6, 0, 0]
    assert segments.taken() == ["reduce 1", "reduce 0"] * 3


def test_gradients_of_two_segments_at_once_are_both_kept() -> None:
    segments = Segments()
    segments.gradients.begin([segments.parameters[0]])
    main_grad(segments.parameters[0]).add_(1.0)
    segments.gradients.begin(segments.parameters[:2])
    for parameter in segments.parameters[:2]:
        main_grad(parameter).add_(1.0)
    segments.gradients.finish()
    assert [float(unit.shards[0].reduced[0]) for unit in segments.units] == [2, 1, 0, 0]


def test_once_a_step_a_chunk_leaves_whole() -> None:
    segments = Segments()
    late = LentGradients(segments.units, lambda s: segments._note("reduce", s, s.bucket.grad), each_microbatch=False)
    late.begin_step()
    for index in (3, 2, 3, 2):
        late.begin([segments.parameters[index]])
        main_grad(segments.parameters[index]).add_(1.0)
    assert segments.taken() == []
    late.finish(0)
    late.finish()
    # All leave, those too that nothing was added to: on another rank something may have been.
    assert segments.taken() == ["reduce 3", "reduce 2", "reduce 1", "reduce 0"]
    assert [float(unit.shards[0].reduced[0]) for unit in segments.units] == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("held", "each", "units"), [(2, True, 2 + 2), (3, True, 3 + 2), (0, True, 4 + 2), (2, False, 2 + 4)]
)
def test_the_most_that_is_lent_counts_neighbours(held: int, each: bool, units: int) -> None:
    segments = Segments(held)
    one = segments.units[0].values_lent
    assert one == segments.units[0].gradients_lent == 4 * 128  # padded for two ranks
    assert most_lent(segments.units, held, each_microbatch=each) == units * one


def test_a_parameter_belongs_to_the_first_segment_that_reads_it() -> None:
    tied, small, own = (described(index) for index in range(3))
    infos = {**small, **own, **tied}
    (shared,), (little,), (alone,) = tied, small, own
    found = units_of([[(shared, little), (alone, shared), (little,)]], [infos], lambda p, _: p is not little)
    assert [(chunk, place, [*each]) for chunk, place, each in found] == [(0, 0, [shared]), (0, 1, [alone])]


class Layer(nn.Module):
    """Reads its weight in the forward and, in the backward, by views that autograd has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.eye(4) * 2)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).relu() @ self.weight[:, :4]


@pytest.mark.parametrize("differentiable", [True, False])
def test_what_comes_before_and_after_a_backward(differentiable: bool) -> None:
    layer, events = Layer(), list[str]()
    layer.weight.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    x = torch.ones(2, 4, requires_grad=differentiable)
    y = gated(layer, (x,), lambda: events.append("before"), lambda: events.append("after"))
    assert events == []
    assert not in_backward()
    y.sum().backward()
    assert events == ["before", "gradient", "after"]


def test_gates_change_no_gradient() -> None:
    layer, other = Layer(), Layer()
    x = torch.randn(3, 4, requires_grad=True)
    outputs: Sequence[Tensor] = [layer(x), gated(other, (x,), lambda: None, lambda: None)]
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in outputs]
    assert torch.equal(*grads)
