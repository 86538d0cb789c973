"""A run says once that its device waits for the host, from the figures of a few steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import RunError
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
        (3.423, 3.510, False),  # however long the step: six rounds of the same queue
        (3.000, 3.0015, True),
        (0.0100, 0.0115, False),  # a short step, all of it in the queue
        (0.0005, 0.036, False),  # one graph
    ],
)
def test_the_device_waits_if_little_is_left_after_the_last_launch(host: float, device: float, waits: bool) -> None:
    assert waits_for_host([Launched(host, device)] * 3) is waits


def test_every_step_that_is_looked_at_must_show_it() -> None:
    assert not waits_for_host([Launched(0.3, 0.3), Launched(0.3, 0.3), Launched(0.1, 0.3)])


class Clock:
    """The host's clock, which stands still unless it is set: how busy this machine is decides nothing."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "time", CLOCK)


class Device:
    """A device that is done ``behind`` seconds after the last launch; it is idle at every other mark."""

    def __init__(self, behind: float) -> None:
        self._behind, self._ends = behind, count()

    def mark(self) -> object:
        return CLOCK.now + self._behind * (next(self._ends) % 2)

    def seconds(self, start: object, end: object) -> float:
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start


def watched(device: Device, steps: int, *, skipped: int = 2, timed: bool = False, between: float = 0.0) -> LaunchWatch:
    """Steps of 20 ms, with ``between`` seconds from the numbers of one to the start of the next."""
    watch = LaunchWatch(device, skipped, "do this", logging.getLogger("test"))
    for _ in range(steps):
        with watch.launching(timed=timed):
            CLOCK.now += 0.02
        watch.synchronised()
        CLOCK.now += between
    return watch


def test_it_is_said_once_after_the_steps_that_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    watched(Device(0.0), 4)
    assert not caplog.records
    watched(Device(0.0), 9)
    (record,) = caplog.records
    assert SAID in record.getMessage()
    assert record.getMessage().endswith("; do this")


def test_what_lies_between_two_steps_is_no_part_of_either(caplog: pytest.LogCaptureFixture) -> None:
    watched(Device(0.0), 9, between=1.0)
    (record,) = caplog.records
    assert "takes 20 of its 20 ms" in record.getMessage()


def test_nothing_is_said_of_a_device_that_is_behind_or_of_steps_whose_actions_are_timed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched(Device(1.0), 9), watched(Device(0.0), 9, timed=True)
    assert not caplog.records


GRAPH = "graph-capture=partial,scope=step"
SETS = ("train.sequence_length=16", "train.steps=8", "model.num_layers=1", "eval.interval=0")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Train a few steps on a device that waits for launches, and return the notices."""
    monkeypatch.setattr(launches, "stopwatch_of", lambda _: Device(0.0))
    monkeypatch.setattr(logging.getLogger("megatron_run"), "propagate", True)

    def train(*sets: str, dropout: float = 0.0, plugins: tuple[str, ...] = ()) -> list[str]:
        sets = (*SETS, f"model.dropout={dropout}", *sets)
        train_here(0, 1, Request(("preset:tiny",), sets, plugins, nproc=1).to_json())
        return [message for message in caplog.messages if SAID in message]

    return train


def test_a_run_says_so_unless_its_steps_are_one_launch(said: Callable[..., list[str]]) -> None:
    assert not said(plugins=(GRAPH,))
    (notice,) = said()
    assert f"type --plugin {GRAPH}, which launches them at once, or raise train.micro_batch_size" in notice
    *_, notice = said(plugins=("graph-capture=compile,backend=aot_eager",))
    assert "type --plugin graph-capture=compile,scope=step, which launches" in notice


@pytest.mark.parametrize(
    ("sets", "dropout", "why"),
    [
        ((), 0.1, "the host positions the random streams before each segment that draws"),
        (("train.offload=mlp",), 0.0, "what a graph saves stays in its memory"),
        (("model.experts.count=4", "model.experts.top_k=2", "model.experts.capacity_factor=1.0"), 0.0, "moe_"),
    ],
    ids=["dropout", "offload", "experts"],
)
def test_no_graph_of_the_step_is_advised_that_would_be_refused(
    sets: tuple[str, ...], dropout: float, why: str, said: Callable[..., list[str]]
) -> None:
    (notice,) = said(*sets, dropout=dropout)
    assert f"type --plugin {GRAPH}" not in notice
    assert "raise train.micro_batch_size" in notice
    assert why in notice
    with pytest.raises(RunError) as refused:
        said(*sets, dropout=dropout, plugins=(GRAPH,))
    assert refused.value.what in notice
