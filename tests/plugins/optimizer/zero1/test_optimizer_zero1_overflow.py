"""A gradient that is not finite, in one value of one rank: nobody steps, nothing changes, the scale moves once."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.plugins.optimizer.optimizer_runs import Case, Held, Planted, run_cases

LITTLE = ("model.num_layers=2", "train.sequence_length=8")
SETS = (
    *LITTLE,
    "train.steps=6",
    "train.lr_warmup=0",  # the first step of a warm-up changes nothing
    "train.precision=fp16",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    "scaler.initial_loss_scale=1024",
    "scaler.hysteresis=1",
    "optimizer.bucket_size=3000",
)
LAYOUTS = {
    "dp": ("parallel.data=4",),
    "tp": ("parallel.tensor=2", "parallel.data=2", "parallel-layer.use=tensor"),
    "pp": ("parallel.pipeline=2", "parallel.data=2", "schedule.use=1f1b"),
}
#: By rank and step: each in another quarter of a parameter that lies in the shares of all.
PLANTED = tuple(Planted(rank, step=2 + rank, where=(2 * rank + 1) / 8) for rank in range(4))


def assert_skipped_together(ranks: list[Held]) -> None:
    for held in ranks:
        assert held.found_inf == [False, True, True, True, True, False]
        scales = [1024.0, 1024.0, 512.0, 256.0, 128.0, 64.0, 64.0]
        assert held.scales == list(pairwise(scales))
        before, *spoiled, after, end = held.weights
        assert before != spoiled[0]
        assert spoiled == [after] * 4
        assert after != end


@pytest.mark.multiproc
@pytest.mark.slow
def test_every_rank_skips_the_step_whoever_finds_it_and_wherever() -> None:
    """One rank after the other finds it, and then none."""
    cases = [Case((*SETS, *sets), ("optimizer=zero1",), PLANTED) for sets in LAYOUTS.values()]
    for name, ranks in zip(LAYOUTS, run_cases(4, cases), strict=True):
        try:
            assert_skipped_together(ranks)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.multiproc
def test_a_gradient_in_bf16_without_a_scaler_is_checked_too() -> None:
    sets = (*LITTLE, "train.steps=3", "train.precision=bf16", "optimizer.grad_dtype=param", "parallel.data=2")
    planted = (Planted(1, step=2, where=0.1),)
    for ranks in run_cases(2, [Case(sets, (f"optimizer={name}",), planted) for name in ("adamw", "zero1")]):
        for held in ranks:
            assert held.found_inf == [False, True, False]
            assert held.weights[1] == held.weights[2]
