"""What a flat optimizer counts and what it waits for, on one of several ranks that are not there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron_run.contracts import ChunkOut, Init, ParameterSpec, Part
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.optim import FlatOptimizer, Replicated, UpdateOptions
from megatron_run_engine.optim.buckets import Bucket
from megatron_run_engine.runtime.comm import Groups, ParallelGroup, Pending
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_engine.runtime.parameter_init import describe_parameters
from megatron_run_testing.build_contexts import context_at, single_process_context
from megatron_run_testing.optimizer.alone import shapes
from megatron_run_testing.optimizer.bench import Bench, SavedState, gradients
from tests.support.late import late


class LateGather(Replicated):
    """Parameters travel until they are waited for or, the worst moment, until the next of their bucket leave."""

    def __init__(self, peers: ParallelGroup) -> None:
        super().__init__(peers)
        self._under_way: dict[Bucket, Pending] = {}

    def start_gather(self, values: Tensor, bucket: Bucket) -> Pending:
        if bucket in self._under_way:
            self._under_way[bucket].wait()
        self._under_way[bucket] = late(values, values.clone())
        return self._under_way[bucket]


def bench(sharing: type[Replicated]) -> Bench:
    """In bf16, so that parameters on their way are no masters."""

    def factory(context: object) -> FlatOptimizer:
        return FlatOptimizer(context, UpdateOptions(), sharing, overlap_param_gather=True)  # type: ignore[arg-type]

    return Bench(factory, single_process_context(dtype=torch.bfloat16))


def step(each: Bench, number: int) -> None:
    """A step after which nobody reads a parameter."""
    each.reduce(*gradients(number))
    each.optimizer.step(0.01, 0.1)
    each.optimizer.start_param_sync()


def same_values(one: Bench, other: Bench) -> bool:
    return all(map(torch.equal, one.values().values(), other.values().values()))


def test_a_step_waits_for_parameters_that_nothing_has_read_since_the_last() -> None:
    waiting, plain = bench(LateGather), bench(Replicated)
    for number in range(2):
        step(waiting, number)
        step(plain, number)
    assert waiting.weight.isnan().all(), "they are on their way"
    waiting.optimizer.ensure_ready([waiting.weight, waiting.bias])
    assert same_values(waiting, plain)


@pytest.mark.parametrize("load", ["load_state", "load_weights"])
def test_what_is_loaded_is_there_at_once_and_nothing_arrives_over_it(load: str) -> None:
    waiting, fresh = bench(LateGather), bench(Replicated)
    saved = SavedState(fresh.optimizer.iter_state(), shapes(fresh))
    step(waiting, 0)
    getattr(waiting.optimizer, load)(saved.read)
    assert same_values(waiting, fresh)


def test_parameters_that_the_next_forward_reads_first_leave_first() -> None:
    gathered: list[int | None] = []

    class Recorded(Replicated):
        def start_gather(self, values: Tensor, bucket: Bucket) -> Pending:
            gathered.append(bucket.chunk)
            return super().start_gather(values, bucket)

    optimizer = FlatOptimizer(single_process_context(dtype=torch.float32), UpdateOptions(), Recorded)
    chunks = [Half(0), Half(0)]
    optimizer.attach(chunks, [describe_parameters(chunk, 0) for chunk in chunks], 1.0)
    optimizer.start_param_sync()
    assert gathered == [0, 1]


class Half(nn.Module):
    """A matrix [8, 3] of which this rank holds four rows, and a bias [5] that every rank holds."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4, 3, dtype=dtype)), nn.Parameter(torch.ones(5, dtype=dtype))
        rows = Part("weight", (8, 3), range(4), 4 * rank)
        self.parameter_specs = {"weight": ParameterSpec(Init("normal", 0.5), parts=(rows,))}

    def forward(self, x: object, microbatch: object) -> ChunkOut:
        raise AssertionError("an optimizer runs no chunk")

    def segments(self) -> tuple[()]:
        return ()


def of_half(options: UpdateOptions, gradient: float) -> FlatOptimizer:
    """An optimizer of a chunk in bf16, after a step's gradients have arrived."""
    chunk = Half(0, torch.bfloat16)
    optimizer = FlatOptimizer(single_process_context(dtype=torch.bfloat16), options, Replicated)
    optimizer.attach([chunk], [describe_parameters(chunk, 0)], 1.0)
    optimizer.zero_grad()
    for parameter in chunk.parameters():
        main_grad(parameter).fill_(gradient)
    optimizer.finish_grad_sync()
    return optimizer


def test_gradients_in_the_parameters_type_reach_the_masters_type() -> None:
    optimizer = of_half(UpdateOptions(grad_dtype="param"), 3.0)
    assert optimizer.clip_(0.0).item() == pytest.approx(3.0 * (4 * 3 + 5) ** 0.5)


def test_what_is_saved_before_the_first_update_is_zero_whatever_the_gradients_were() -> None:
    pieces = list(of_half(UpdateOptions(), torch.inf).iter_state())
    moments = [piece.tensor for piece in pieces if piece.field.startswith("exp_avg")]
    assert len(moments) == 2 * 2
    assert not any(tensor.any() for tensor in moments)


def test_the_zeros_of_what_tensor_parallel_ranks_hold_alike_are_counted_once() -> None:
    counts = []
    for rank in range(2):
        chunk, context = Half(rank), context_at(Topology(Sizes(tensor=2), rank), Groups(), dtype=torch.float32)
        optimizer = FlatOptimizer(context, UpdateOptions(), Replicated)
        optimizer.attach([chunk], [describe_parameters(chunk, rank)], 1.0)
        optimizer.zero_grad()
        optimizer.finish_grad_sync()
        counts.append(optimizer.count_zeros().item())
    assert counts == [4 * 3 + 5, 4 * 3]
