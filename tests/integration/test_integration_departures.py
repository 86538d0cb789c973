"""Gradients leave while the backward of the last microbatch still runs, and never before it."""

from __future__ import annotations

import pytest

from tests.plugins.optimizer.optimizer_runs import Case, run_cases

MICROBATCHES = 4
SETS = (
    "train.steps=3",
    "parallel.data=2",
    "train.micro_batch_size=1",
    f"train.global_batch_size={2 * MICROBATCHES}",
    "optimizer.bucket_size=3000",
    "model.tie_embeddings=false",
)


@pytest.mark.multiproc
@pytest.mark.parametrize("optimizer", ["adamw", "zero1"])
def test_buckets_leave_during_the_last_backward_and_only_then(optimizer: str) -> None:
    settings = SETS, (*SETS, "optimizer.overlap_grad_reduce=false")
    overlapped, waiting = run_cases(2, [Case(sets, (f"optimizer={optimizer}",)) for sets in settings])
    for held in overlapped:
        total = held.arrivals[0]
        assert held.arrivals == [total] * 3
        learning, *later = held.departures
        assert set(learning) == {total}  # how often a gradient arrives is learned in the first step
        for departures in later:
            assert len(departures) == len(learning) > 3
            assert total * (MICROBATCHES - 1) // MICROBATCHES < departures[0] < total
            assert len(set(departures)) > 2, "they leave one by one"
            assert departures == sorted(departures)
    for held in waiting:
        assert all(set(departures) == {held.arrivals[0]} for departures in held.departures)
    assert [held.weights for held in overlapped] == [held.weights for held in waiting]
