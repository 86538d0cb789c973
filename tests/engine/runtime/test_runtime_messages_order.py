"""The real messenger on a transport with NCCL's rules: when a header must be waited for, and when it must not be."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron_run.pipeline.lower import Instruction
from megatron_run_engine.runtime.comm import Channels
from megatron_run_engine.runtime.messages import Messenger
from megatron_run_testing.schedule.ordered_channels import SwappedMessageError, TransportDeadlockError
from tests.engine.runtime.ordered_transport import OrderedTransport
from tests.support.random_schedules import random_plan
from tests.support.toy_stage import faults

SEEDS = range(100)
#: A plan of one stage sends nothing.
SENDING = [seed for seed in SEEDS if random_plan(seed).stages > 1]
some_seeds = pytest.mark.parametrize(
    "seeds", [SENDING[:12], pytest.param(SENDING[12:], marks=pytest.mark.nightly)], ids=["some", "all others"]
)


def outcome(
    seed: int, *, lookahead: int | None, one_stream: bool, thinning: bool = True, mislabel: bool = False
) -> str:
    """What becomes of a random schedule of a model that drops rows, or of the usual model.

    ``mislabel``: the program says of its receives that they stand in the global order when they do not, and of those
    that do that they do not.
    """
    plan = random_plan(seed)

    def run(stage: int, channels: Channels) -> list[str]:
        messenger = Messenger(channels, range(plan.stages), torch.device("cpu"))
        return faults(plan, stage, messenger, lookahead, thinning=thinning, paired=seed % 2 == 1, alter=alter)

    def alter(instruction: Instruction) -> Instruction:
        return instruction._replace(one_order=instruction.one_order is not mislabel)

    try:
        wrong = OrderedTransport(plan.stages, one_stream=one_stream).run(run)
    except SwappedMessageError:
        return "swapped"
    except TransportDeadlockError:
        return "deadlock"
    return "wrong" if any(wrong) else "ok"


@some_seeds
def test_headers_in_the_global_order_run_on_one_stream_a_stage(seeds: list[int]) -> None:
    for seed in seeds:
        assert outcome(seed, lookahead=None, one_stream=True) == "ok", f"seed {seed}"


@some_seeds
def test_headers_ahead_of_their_place_run_on_a_channel_for_each_direction(seeds: list[int]) -> None:
    for seed in seeds:
        assert outcome(seed, lookahead=1, one_stream=False) == "ok", f"seed {seed}"


def test_a_receive_that_is_put_off_fails_where_one_stream_carries_everything() -> None:
    found = Counter(outcome(seed, lookahead=None, one_stream=True, mislabel=True) for seed in SEEDS)
    assert found["deadlock"] + found["swapped"] > 20, found


def test_waiting_for_a_header_that_is_posted_ahead_deadlocks() -> None:
    found = Counter(outcome(seed, lookahead=1, one_stream=False, mislabel=True) for seed in SEEDS)
    assert found["deadlock"] > 20, found


@some_seeds
def test_shapes_that_everybody_knows_run_without_headers(seeds: list[int]) -> None:
    for seed in seeds:
        assert outcome(seed, lookahead=None, one_stream=True, thinning=False) == "ok", f"seed {seed}"
