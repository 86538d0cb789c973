"""Clocks are aligned by barriers: the true offset is within the error, and the error is small where a barrier is."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import torch

from megatron_run_engine.training.tracing import clock_offset, device_clock

Rounds = list[list[float]]


def barriers(offset: float, delays: list[list[float]]) -> tuple[Rounds, Rounds]:
    """What rank 0 and a rank whose clock is ``offset`` behind write down.

    For each barrier: by how much the two enter after its start, and leave after the later one entered.
    """
    first, rank, now = [], [], 1000.0
    for enter_0, enter, leave_0, leave in delays:
        opened = now + max(enter_0, enter)
        first.append([now + enter_0, opened + leave_0])
        rank.append([now + enter - offset, opened + leave - offset])
        now = opened + max(leave_0, leave)
    return first, rank


@pytest.mark.parametrize("offset", [0.0, 0.25, -86400.0])
def test_the_true_offset_is_within_the_error(offset: float) -> None:
    for seed in range(50):
        draw = random.Random(seed)
        first, rank = barriers(offset, [[draw.expovariate(1000) for _ in range(4)] for _ in range(10)])
        found = clock_offset(first, rank)
        assert abs(found.seconds - offset) <= found.error + 1e-9, seed
        spent = [(b - a + d - c) / 2 for (a, b), (c, d) in zip(first, rank, strict=True)]
        assert found.error <= min(spent) + 1e-9, "no worse than the mean time in the quickest barrier"
        assert found.error <= clock_offset(first[:5], rank[:5]).error + 1e-9, "more barriers tell more"


def test_one_prompt_barrier_suffices() -> None:
    held_up, prompt = [0.3, 0.0, 0.2, 0.1], [0.0, 0.0, 0.0001, 0.0001]
    found = clock_offset(*barriers(5.0, [held_up, prompt, held_up]))
    assert found.seconds == pytest.approx(5.0, abs=1e-9)
    assert found.error == pytest.approx(0.0001)


def test_ranks_of_one_clock_that_are_late_in_turn_still_agree() -> None:
    late = [[0.01, 0.0, 0.0, 0.0], [0.0, 0.01, 0.0, 0.0]]
    assert clock_offset(*barriers(0.0, late)) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_on_the_host_the_clock_is_the_processes_own() -> None:
    with mock.patch("time.perf_counter", side_effect=[3.0, 7.0]):
        clock = device_clock(torch.device("cpu"))
        assert (clock(), clock()) == (3.0, 7.0)


def test_on_a_gpu_the_clock_is_read_once_the_callers_stream_is_done() -> None:
    happened = mock.Mock()
    happened.read.return_value = 7.0
    with (
        mock.patch("torch.cuda.current_stream", happened.stream),
        mock.patch("time.perf_counter", happened.read),
    ):
        assert device_clock(torch.device("cuda", 1))() == 7.0
    assert happened.mock_calls == [
        mock.call.stream(torch.device("cuda", 1)),
        mock.call.stream().synchronize(),
        mock.call.read(),
    ]
