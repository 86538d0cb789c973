"""A run says once that its device waits for the host, from the figures of a few steps."""

from __future__ import annotations

import logging
import time
from itertools import count

import pytest

from megatron_run.config.request import Request
from megatron_run_engine.training.health import launches
from megatron_run_engine.training.health.launches import Launched, LaunchWatch, waits_for_host
from tests.support.training import train_here

SAID = "the GPU waits for the host"


@pytest.mark.parametrize(
    ("host", "device", "waits"),
    [
        (0.303, 0.3045, True),  # small kernels: done as soon as the last is launched
        (0.303, 0.320, False),  # a twentieth of the step was left in the queue
        (0.110, 0.585, False),  # large ones: the host is far ahead
        (0.498, 0.585, False),  # and where a full queue holds it up
        (0.0005, 0.036, False),  # one graph
    ],
)
def test_the_device_waits_if_little_is_left_after_the_last_launch(host: float, device: float, waits: bool) -> None:
    assert waits_for_host([Launched(host, device)] * 3) is waits


def test_every_step_that_is_looked_at_must_show_it() -> None:
    assert not waits_for_host([Launched(0.3, 0.3), Launched(0.3, 0.3), Launched(0.1, 0.3)])


class Device:
    """A device that is done ``behind`` seconds after the last launch."""

    def __init__(self, behind: float) -> None:
        self._behind, self._ends = behind, count()

    def mark(self) -> object:
        return time.perf_counter() + self._behind * (next(self._ends) % 2)

    def seconds(self, start: object, end: object) -> float:
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start


def watched(device: Device, steps: int, *, skipped: int = 2, timed: bool = False) -> LaunchWatch:
    watch = LaunchWatch(device, skipped, logging.getLogger("test"))
    for _ in range(steps):
        with watch.launching(timed=timed):
            time.sleep(0.02)
        watch.synchronised()
    return watch


def test_it_is_said_once_after_the_steps_that_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    watched(Device(0.0), 4)
    assert not caplog.records
    watched(Device(0.0), 9)
    (record,) = caplog.records
    assert SAID in record.getMessage()
    assert "--plugin graph-capture=partial,scope=step" in record.getMessage()


def test_nothing_is_said_of_a_device_that_is_behind_or_of_steps_whose_actions_are_timed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched(Device(1.0), 9), watched(Device(0.0), 9, timed=True)
    assert not caplog.records


@pytest.mark.parametrize(("capture", "told"), [((), 1), (("graph-capture=partial,scope=step",), 0)])
def test_a_run_says_so_unless_its_steps_are_one_launch(
    capture: tuple[str, ...], told: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launches, "stopwatch_of", lambda _: Device(0.0))
    monkeypatch.setattr(logging.getLogger("megatron_run"), "propagate", True)
    sets = ("train.sequence_length=16", "train.steps=8", "model.num_layers=1", "model.dropout=0", "eval.interval=0")
    train_here(0, 1, Request(configs=("preset:tiny",), sets=sets, plugins=capture, nproc=1).to_json())
    assert caplog.text.count(SAID) == told
