"""The global batch: Megatron's ramp-up by brute force, and the arithmetic a user is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_run.errors import ExitCode, InputError, Problems
from megatron_run.planning.batch_size import BatchRamp, BatchSizes, total_samples, total_steps


def train(batch: int = 8, micro: int = 1, ramp: tuple[int, int, int] | None = None, **more: Any) -> Any:
    ramp_up = SimpleNamespace(start=ramp[0], increment=ramp[1], samples=ramp[2]) if ramp else None
    values = {"steps": 10, "samples": None, **more}
    return SimpleNamespace(global_batch_size=batch, micro_batch_size=micro, ramp_up=ramp_up, **values)


def walk(start: int, increment: int, samples: int, full: int, steps: int) -> list[tuple[int, int]]:
    """(samples before, batch) of each step, counted one step at a time in exact fractions."""
    increments, consumed, found = (full - start) // increment, 0, []
    for _ in range(steps):
        grown = [level for level in range(increments + 1) if consumed * increments >= level * samples]
        batch = full if consumed >= samples else start + increment * max(grown)
        found.append((consumed, batch))
        consumed += batch
    return found


RAMPS = [(2, 2, 100, 8), (8, 8, 500, 64), (1, 1, 10, 4), (4, 4, 7, 32), (3, 5, 1000, 33), (8, 8, 100, 8), (2, 2, 0, 8)]


@pytest.mark.parametrize(("start", "increment", "samples", "full"), RAMPS)
def test_ramp_equals_a_walk_step_by_step(start: int, increment: int, samples: int, full: int) -> None:
    ramp = BatchRamp(full, start, increment, samples)
    walked = walk(start, increment, samples, full, 400)
    assert [(ramp.consumed_at(step), ramp.at(ramp.consumed_at(step))) for step in range(400)] == walked


@pytest.mark.parametrize(("start", "increment", "samples", "full"), RAMPS)
def test_steps_within_counts_whole_steps(start: int, increment: int, samples: int, full: int) -> None:
    ramp = BatchRamp(full, start, increment, samples)
    ends = [before + batch for before, batch in walk(start, increment, samples, full, 300)]
    for budget in range(0, 600, 7):
        assert ramp.steps_within(budget) == sum(end <= budget for end in ends)


def test_without_ramp_up_every_step_takes_the_global_batch() -> None:
    sizes = BatchSizes(train(batch=12, micro=2, steps=5), data_parallel=3)
    assert [sizes.at(consumed) for consumed in (0, 12, 1000)] == [12, 12, 12]
    assert sizes.microbatches(12) == 2
    assert sizes.all_microbatches() == {2}
    assert [sizes.consumed_at(step) for step in range(4)] == [0, 12, 24, 36]


def test_microbatch_counts_of_a_ramp_are_those_its_steps_meet() -> None:
    config = train(batch=16, micro=2, ramp=(4, 4, 60), steps=40)
    sizes = BatchSizes(config, data_parallel=2)
    met = {batch // 4 for _, batch in walk(4, 4, 60, 16, 40)}
    assert sizes.all_microbatches() == met == {1, 2, 3, 4}
    assert BatchSizes(train(batch=16, ramp=(4, 4, 60), steps=2), 1).all_microbatches() == {4}


def test_a_steep_ramp_skips_batches() -> None:
    # 32 - 4 = 7 increments of 4 over 7 samples: one level a sample, the first step of 4 jumps to the fifth level
    assert BatchSizes(train(batch=32, ramp=(4, 4, 7), steps=9), 1).all_microbatches() == {4, 20, 32}


def test_steps_come_from_steps_or_from_samples() -> None:
    assert total_steps(train(steps=7)) == 7
    assert total_samples(train(steps=7)) == 56
    assert total_steps(train(steps=None, samples=63)) == 7
    assert total_samples(train(steps=None, samples=63)) == 63
    ramped = train(steps=None, samples=22, ramp=(2, 2, 12))  # 2 + 2 + 4 + 6 + 8
    assert total_steps(ramped) == 5
    assert total_samples(train(steps=5, ramp=(2, 2, 12))) == 22


def test_fewer_samples_than_one_batch_is_refused() -> None:
    with pytest.raises(InputError, match=r"train.samples=7 is less than the first global batch: a step takes 8"):
        total_steps(train(steps=None, samples=7))


@pytest.mark.parametrize(
    ("config", "data_parallel", "message"),
    [
        (train(batch=10, micro=2), 2, r"train.global_batch_size=10 is not .*: 2 x 2 = 4; .* to 8 or 12"),
        (train(batch=3, micro=4), 1, r"train.global_batch_size=3 is not .*: 4 x 1 = 4; .* to 4"),
        (train(batch=8, ramp=(3, 5, 10)), 4, r"train.ramp_up.start=3 .*: 1 x 4 = 4; .* to 4"),
        (train(batch=8, ramp=(4, 2, 10)), 4, r"train.ramp_up.increment=2 .*: 1 x 4 = 4; .* to 4"),
        (
            train(batch=8, ramp=(2, 4, 10)),
            1,
            r"increment=4 never .*: 8 - 2 = 6, .* of 4; set train.ramp_up.increment to 3 or 6",
        ),
        (train(batch=8, ramp=(10, 2, 10)), 1, r"ramp_up.start=10 is above train.global_batch_size=8; start at 8"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_its_arithmetic(
    config: Any, data_parallel: int, message: str
) -> None:
    with pytest.raises(Problems, match=message) as caught:
        BatchSizes(config, data_parallel)
    assert caught.value.exit_code == ExitCode.INPUT


@pytest.mark.parametrize(
    ("full", "start", "increment", "keys"),
    [
        (100, 30, 30, ["global_batch_size=100", "ramp_up.start=30", "ramp_up.increment=30"]),
        (96, 30, 30, ["ramp_up.start=30", "ramp_up.increment=30"]),
        (96, 33, 64, ["ramp_up.start=33", "ramp_up.increment=64 never"]),
        (96, 130, 5, ["ramp_up.start=130 is not", "ramp_up.increment=5", "ramp_up.start=130 is above"]),
    ],
)
def test_all_mistakes_of_a_ramp_are_reported_at_once(full: int, start: int, increment: int, keys: list[str]) -> None:
    with pytest.raises(Problems) as caught:
        BatchSizes(train(batch=full, micro=8, ramp=(start, increment, 1000)), 4)
    problems = [str(problem) for problem in caught.value.problems]
    assert len(problems) == len(keys)
    assert all(key in problem for key, problem in zip(keys, problems, strict=True))


@pytest.mark.parametrize(("increment", "advised"), [(30, "32"), (40, "32 or 96"), (64, "32 or 96"), (100, "96")])
def test_the_increment_that_is_advised_both_divides_and_reaches_the_full_batch(increment: int, advised: str) -> None:
    with pytest.raises(Problems, match=rf"set train.ramp_up.increment to {advised}$") as caught:
        BatchSizes(train(batch=128, micro=8, ramp=(32, increment, 1000)), 4)
    assert len(caught.value.problems) == 1
    for size in advised.split(" or "):
        BatchSizes(train(batch=128, micro=8, ramp=(32, int(size), 1000)), 4)


def test_a_ramp_of_more_sizes_than_anybody_plans_is_refused_before_it_is_walked() -> None:
    with pytest.raises(InputError, match=r"has 99999999 sizes of the batch: .*; raise train\.ramp_up\.increment"):
        BatchRamp(10**8, 1, 1, 10**18)
    assert BatchRamp(10**5, 1, 1, 10**6).increments == 10**5 - 1
