"""Observers are called together, and none can harm the run."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from megatron_run.contracts import CheckpointMetrics, EvalMetrics, Observer, StepMetrics, StepTrace
from megatron_run_engine.training.observers import Observers
from megatron_run_testing.observer import example_run, example_step, example_trace

LOG = logging.getLogger("test-observing")


class Recording(Observer):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_step_end(self, metrics: StepMetrics) -> None:
        self.told.append(f"step {metrics.step}")

    def on_skip(self, metrics: StepMetrics) -> None:
        self.told.append(f"skip {metrics.step}")

    def on_eval_end(self, metrics: EvalMetrics) -> None:
        self.told.append(metrics.split)

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.told.append(f"saved {metrics.step}")

    def on_sample(self, text: str) -> None:
        self.told.append(text)

    def on_error(self, error: BaseException) -> None:
        self.told.append(str(error))

    def on_train_end(self, reason: str) -> None:
        self.told.append(reason)


class Failing(Recording):
    def on_step_end(self, metrics: StepMetrics) -> None:
        super().on_step_end(metrics)
        raise OSError("disk full")


def test_every_event_reaches_every_observer_in_order(tmp_path: Path) -> None:
    first, second = Recording(), Recording()
    observers = Observers([("first", first), ("second", second)], LOG)
    observers.on_train_start(example_run(tmp_path))
    observers.on_step_end(example_step(1))
    observers.on_step_end(example_step(2, None))
    observers.on_eval_end(EvalMetrics(2, "validation", 1.0, 2.7, 10))
    observers.on_checkpoint(CheckpointMetrics(2, tmp_path, 10, 0.1, 0.1))
    observers.on_sample("text")
    observers.on_error(ValueError("broken"))
    observers.on_train_end("stopped")
    told = ["step 1", "step 2", "skip 2", "validation", "saved 2", "text", "broken", "stopped"]
    assert first.told == second.told == told


def test_one_that_raises_is_named_and_disabled_after_three_failures(caplog: pytest.LogCaptureFixture) -> None:
    failing, healthy = Failing(), Recording()
    observers = Observers([("failing", failing), ("healthy", healthy)], LOG)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            observers.on_step_end(example_step(step))
    assert failing.told == ["step 1", "step 2", "step 3"]
    assert healthy.told == [f"step {step}" for step in range(1, 6)]
    assert caplog.messages == [
        *(f"observer failing failed in on_step_end: OSError: disk full ({count} of 3)" for count in (1, 2, 3)),
        "observer failing is disabled after 3 failures; training continues",
    ]


class Leaving(Recording):
    def on_step_end(self, metrics: StepMetrics) -> None:
        sys.exit("no server")


def test_one_that_calls_sys_exit_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Observers([("leaving", Leaving())], LOG).on_step_end(example_step(1))
    assert caplog.messages == ["observer leaving failed in on_step_end: SystemExit: no server (1 of 3)"]


def test_failures_need_not_follow_one_another() -> None:
    failing = Failing()
    observers = Observers([("failing", failing)], LOG)
    for step in (1, 2, 3):
        observers.on_step_end(example_step(step))
        observers.on_sample("between")
    assert failing.told == ["step 1", "between", "step 2", "between", "step 3"]


class Tracing(Recording):
    def __init__(self, *steps: object) -> None:
        super().__init__()
        self.steps = steps

    def traced_steps(self) -> tuple[object, ...]:  # type: ignore[override]  # whatever a plugin may say
        return self.steps

    def on_trace(self, trace: StepTrace) -> None:
        self.told.append(f"trace {trace.step}")
        if trace.step == 5:
            raise OSError("disk full")


def test_a_trace_goes_to_those_that_asked_for_its_step() -> None:
    first, second, neither = Tracing(2, 3), Tracing(3, 4), Recording()
    observers = Observers([("same", first), ("same", second), ("neither", neither)], LOG)
    assert observers.traced_steps() == {2, 3, 4}
    for step in range(1, 6):
        observers.on_trace(example_trace(step))
    assert first.told == ["trace 2", "trace 3"]
    assert second.told == ["trace 3", "trace 4"]
    assert neither.told == []


def test_one_that_asks_for_nonsense_or_fails_to_draw_is_named(caplog: pytest.LogCaptureFixture) -> None:
    nonsense, failing, healthy = Tracing("soon"), Tracing(5), Tracing(5)
    healthy.on_trace = lambda trace: healthy.told.append("drawn")  # type: ignore[method-assign]  # draws it
    observers = Observers([("nonsense", nonsense), ("failing", failing), ("healthy", healthy)], LOG)
    with caplog.at_level(logging.WARNING):
        assert observers.traced_steps() == {5}
        observers.on_trace(example_trace(5))
    assert (nonsense.told, healthy.told) == ([], ["drawn"])
    assert [message.partition(": ")[0] for message in caplog.messages] == [
        "observer nonsense failed in traced_steps",
        "observer failing failed in on_trace",
    ]


def test_an_interrupt_is_no_failure_of_an_observer() -> None:
    class Interrupted(Observer):
        def on_step_end(self, metrics: StepMetrics) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Observers([("interrupted", Interrupted())], LOG).on_step_end(example_step(1))
