"""The distributed optimizer trains what the replicated one trains, whatever the layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from megatron_run_engine.optim import Sharded
from megatron_run_optimizer_zero1 import Zero1Options, megatron_run_create_optimizer
from megatron_run_testing.build_contexts import single_process_context
from megatron_run_testing.optimizer.bench import Bench, gradients
from tests.plugins.optimizer.optimizer_runs import Case, Held, run_cases, state_of
from tests.support.late import late

#: Small buckets, so that there are several, shares are cut within parameters, and the last one is mostly padding.
COMMON = ("optimizer.bucket_size=3000",)
#: Two microbatches for each of two ranks.
LITTLE = (
    *COMMON,
    "train.sequence_length=8",
    "train.steps=3",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "model.num_layers=2",
)
WAITING = ("optimizer.overlap_param_gather=false", "optimizer.overlap_grad_reduce=false")


def pair(*sets: str) -> list[Case]:
    """The same run with replicated and with sharded state."""
    chosen = {each.partition("=")[0]: each for each in (*LITTLE, *sets)}  # the last one counts
    return [Case(tuple(chosen.values()), (f"optimizer={name}",)) for name in ("adamw", "zero1")]


def assert_same(replicated: Sequence[Held], sharded: Sequence[Held]) -> None:
    """Losses, norms, weights at every step and the gathered state, bit for bit."""
    assert sharded[0].losses == replicated[0].losses
    assert len(set(replicated[0].losses)) == len(replicated[0].losses)
    assert sharded[0].norms == replicated[0].norms
    assert [held.weights for held in sharded] == [held.weights for held in replicated]
    one, other = state_of(replicated), state_of(sharded)
    assert one.keys() == other.keys()
    assert {field for _, field in one} >= {"master"}
    for key, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[key], err_msg=str(key))


def run_pairs(world: int, variants: dict[str, tuple[str, ...]]) -> None:
    """Run each variant with both optimizers, and compare."""
    runs = run_cases(world, [case for sets in variants.values() for case in pair(*sets)])
    for index, name in enumerate(variants):
        try:
            assert_same(*runs[2 * index : 2 * index + 2])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.multiproc
def test_on_two_ranks_it_equals_adamw_bit_for_bit() -> None:
    run_pairs(
        2,
        {
            "clipped": ("train.clip_norm=0.5",),
            "bf16": ("train.precision=bf16",),
            "fp16": ("train.precision=fp16", "scaler.loss_scale=1024"),
            "16-bit gradients": ("train.precision=bf16", "optimizer.grad_dtype=param"),
            "momentum, not clipped": ("optimizer.rule=sgd", "optimizer.momentum=0.9", "train.clip_norm=0"),
            "whole matrices": ("optimizer.rule=muon",),
            "tiny buckets": ("optimizer.bucket_size=1",),
            "one bucket": ("optimizer.bucket_size=10000000",),
        },
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_parameters_are_on_their_way_after_a_step_only_with_overlap(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sharded, "start_gather", lambda _, values, bucket: late(values, values.clone()))
    options, context = Zero1Options(overlap_param_gather=overlap), single_process_context(dtype=torch.bfloat16)
    made = Bench(lambda given: megatron_run_create_optimizer(given, options), context)
    made.reduce(*gradients(0))
    made.optimizer.step(0.01, 0.1)
    made.optimizer.start_param_sync()
    assert bool(made.weight.isnan().all()) is overlap


@pytest.mark.multiproc
def test_overlap_changes_no_bit() -> None:
    overlapped, waiting = run_cases(2, [Case((*LITTLE, *more), ("optimizer=zero1",)) for more in ((), WAITING)])
    assert_same(overlapped, waiting)


PIPELINE = ("parallel.pipeline=2", "parallel.data=2")
TENSOR = ("parallel.tensor=2", "parallel.data=2", "parallel-layer.use=tensor")
#: Each way to split once; the tables are tied, and norms are reduced over tensor ranks.
LAYOUTS = {
    "dp 4, clipped": ("parallel.data=4", "train.global_batch_size=8", "train.clip_norm=0.5"),
    "pp 2, tied embeddings": (*PIPELINE, "schedule.use=1f1b"),
    "tp 2, sequence": (*TENSOR, "parallel.sequence=true"),
}
MORE_LAYOUTS = {
    "dp 4, not clipped": ("parallel.data=4", "train.global_batch_size=8", "train.clip_norm=0"),
    "pp 2, bf16": (*PIPELINE, "schedule.use=1f1b", "train.precision=bf16"),
    "pp 2, untied": (*PIPELINE, "schedule.use=1f1b", "model.tie_embeddings=false"),
    "vpp 2": (*PIPELINE, "schedule.use=interleaved", "parallel.chunks=2", "model.num_layers=4"),
    "zero-bubble": (*PIPELINE, "schedule.use=zero-bubble"),
    "tp 2": TENSOR,
}


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "layouts", [pytest.param(LAYOUTS, id="each"), pytest.param(MORE_LAYOUTS, id="more", marks=pytest.mark.nightly)]
)
def test_on_four_ranks_it_equals_adamw_bit_for_bit(layouts: dict[str, tuple[str, ...]]) -> None:
    run_pairs(4, layouts)
