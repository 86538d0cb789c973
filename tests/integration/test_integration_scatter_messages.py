"""Tensor-parallel ranks that send a part of each pipeline message train as those that send all of it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.integration.pairwise import WHOLE
from tests.integration.pieces import Case, Ran, joined, run_cases

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

STEPS = 4 if WHOLE else 2
SCATTER = "parallel.scatter_messages=true"
SETS = (
    "model.num_heads=4",
    "train.global_batch_size=4",
    "train.sequence_length=16",
    f"train.steps={STEPS}",
    "eval.interval=2",
    "eval.batches=1",
)
#: One and two chunks a stage; a V splits its backward too.
SCHEDULES = ("1f1b", "zero-bubble,variant=v", *["interleaved", "zero-bubble"] * WHOLE)
#: Those that are tried under sequence parallelism too; ``make grid`` tries all.
SEQUENCE = SCHEDULES if WHOLE else SCHEDULES[:1]
#: A layer for each place: two chunks on two stages, or one.
LAYERS = {"1f1b": 2, "interleaved": 4, "zero-bubble,variant=v": 4, "zero-bubble": 2}
#: By what is sent: "whole" messages, "scattered" ones, or under sequence parallelism, each of them.
WAYS: dict[str, tuple[str, ...]] = {
    "whole": ("model.dropout=0.1",),
    "scattered": ("model.dropout=0.1", SCATTER),
    "sequence": ("parallel.sequence=true",),
    "sequence, scattered": ("parallel.sequence=true", SCATTER),
}


def cases() -> dict[tuple[str, str], Case]:
    return {
        (schedule, way): Case(
            (*SETS, f"model.num_layers={LAYERS[schedule]}", *sets), ("parallel-layer=tensor", f"schedule={schedule}")
        )
        for schedule in SCHEDULES
        for way, sets in WAYS.items()
        if "sequence" not in way or schedule in SEQUENCE
    }


@cache
def ran() -> dict[tuple[str, str], list[Ran]]:
    """By schedule, whole and scattered: what each of two tensor ranks on each of two stages saw."""
    made = cases()
    return dict(zip(made, run_cases(4, list(made.values())), strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_and_gradients_are_those_of_whole_messages_bit_for_bit(schedule: str) -> None:
    whole, scattered = ran()[schedule, "whole"], ran()[schedule, "scattered"]
    assert len(whole[0].losses) == STEPS
    assert scattered[0].losses == whole[0].losses
    assert scattered[0].seen.norms == whole[0].seen.norms
    assert scattered[0].seen.validation == whole[0].seen.validation
    expected = joined(whole)
    for name, gradient in joined(scattered).items():
        np.testing.assert_array_equal(gradient, expected[name], err_msg=name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_rank_sends_half_the_bytes(schedule: str) -> None:
    for whole, scattered in zip(ran()[schedule, "whole"], ran()[schedule, "scattered"], strict=True):
        assert whole.sent > 0
        assert 2 * scattered.sent == whole.sent


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensor_ranks_of_a_stage_gather_each_message_in_one_order(schedule: str) -> None:
    whole, scattered = ran()[schedule, "whole"], ran()[schedule, "scattered"]
    for rank in (0, 2):
        assert scattered[rank].collectives == scattered[rank + 1].collectives
        gathers = [shape for name, shape in scattered[rank].collectives if name.startswith("all_gather")]
        received = whole[2 - rank].sent // 4  # what the other stage sends this one, in fp32 values
        assert sum(np.prod(shape) for shape in gathers) == received


@pytest.mark.parametrize("schedule", SEQUENCE)
def test_under_sequence_parallelism_nothing_changes_since_messages_are_parts_already(schedule: str) -> None:
    whole, scattered = ran()[schedule, "sequence"], ran()[schedule, "sequence, scattered"]
    assert scattered[0].losses == whole[0].losses
    assert [rank.sent for rank in scattered] == [rank.sent for rank in whole]
    assert 2 * whole[0].sent == ran()[schedule, "whole"][0].sent
