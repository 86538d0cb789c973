"""The endless stream of samples: complete, shuffled, and a pure function of the position."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from megatron_run_engine.data.batches import epoch_order, sample_index


@pytest.mark.parametrize("length", [1, 2, 7, 100])
def test_each_epoch_meets_every_sample_once(length: int) -> None:
    for epoch in range(3):
        met = [sample_index(length, 1234, epoch * length + offset) for offset in range(length)]
        assert sorted(met) == list(range(length))


def test_the_stream_is_one_shuffled_epoch_after_another() -> None:
    stream = [sample_index(50, 1, position) for position in range(100)]
    assert stream == [*epoch_order(50, 1, 0), *epoch_order(50, 1, 1)]
    assert stream[:50] != sorted(stream[:50])


def test_epochs_and_seeds_differ_in_order() -> None:
    orders = [tuple(epoch_order(50, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)]
    assert len(set(orders)) == 4


def test_a_position_needs_no_history() -> None:
    forwards = [sample_index(11, 5, position) for position in range(60)]
    epoch_order.cache_clear()
    assert [sample_index(11, 5, position) for position in reversed(range(60))] == forwards[::-1]


def test_every_place_is_equally_likely() -> None:
    # chi-square of where sample 0 lands over 4000 epochs of 8: 7 degrees of freedom, 99.9 % below 24.3
    places = np.bincount([int(np.argmin(epoch_order(8, 7, epoch))) for epoch in range(4000)], minlength=8)
    assert ((places - 500) ** 2 / 500).sum() < 24.3


def test_the_remembered_order_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(5, 1, 0)[0] = 3


@pytest.mark.multiproc
def test_processes_agree_whatever_their_hash_seed() -> None:
    code = """
import sys
sys.modules["torch"] = object()  # what its import takes is most of such a process, and the order needs none of it
from megatron_run_engine.data.batches import sample_index
print([sample_index(97, 3, position) for position in range(300)])
"""
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # this process has a random one
    environment = {**os.environ, "PYTHONHASHSEED": other, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert asked.stdout == f"{[sample_index(97, 3, position) for position in range(300)]}\n"


def test_the_order_is_the_one_that_was_released() -> None:
    # a resumed run must go on in the order in which it began: this list may never change
    assert list(epoch_order(8, 1234, 0)) == [5, 6, 3, 7, 4, 1, 2, 0]
