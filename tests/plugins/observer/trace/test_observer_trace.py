"""observer=trace: which steps it asks for, and the files that it leaves."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode, RunError
from megatron_run.files.safe_folder import SafeFolder
from megatron_run.pipeline.simulate import timeline
from megatron_run.pipeline.trace_events import Event, trace_events
from megatron_run.planning import load_config, resolve
from megatron_run_cli.main import main
from megatron_run_engine.training.observers import Observers
from megatron_run_observer_trace import Options, Trace, step_document
from megatron_run_testing.observer import example_run, example_trace
from tests.support.forked import forked_command


def traced(folder: Path, wanted: str | None = None, **run: int) -> Trace:
    """The observer after the start of a run of 40 steps unless ``run`` says otherwise."""
    observer = Trace(Options(steps=wanted))
    observer.on_train_start(example_run(folder, **{"steps": 40, **run}))
    return observer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("wanted", "run", "expected"),
    [
        ("5", {}, [5]),
        ("5-8", {}, [5, 6, 7, 8]),
        ("38-900000000000", {}, [38, 39, 40]),
        ("1-22", {"first_step": 21}, [21, 22]),
        (None, {}, [10]),
        (None, {"first_step": 21}, [30]),
        (None, {"steps": 3}, [3]),
        (None, {"steps": 0}, []),
        (None, {"first_step": 41}, []),
    ],
)
def test_it_asks_for_the_steps_that_the_attempt_runs(
    tmp_path: Path, wanted: str | None, run: dict[str, int], expected: list[int]
) -> None:
    assert list(traced(tmp_path, wanted, **run).traced_steps()) == expected


def test_steps_after_the_end_are_refused_before_the_run() -> None:
    with pytest.raises(RunError) as caught:
        load_config("preset:tiny", plugins=("observer=trace,steps=21-30",))
    message = str(caught.value)
    assert message.startswith("observer.trace.steps=21-30: the run ends with step 20 (train.steps) (from preset:tiny")
    assert message.endswith(" and --plugin observer=trace,steps=21-30); name steps of 1-20, or leave them out")
    load_config("preset:tiny", plugins=("observer=trace,steps=20-30",))


@pytest.mark.parametrize("steps", ["0", "6-5", "0-3", "-3", "5-", "1e1", "a", "", "5,6", "true"])
def test_other_words_for_steps_are_refused_in_one_line(steps: str) -> None:
    with pytest.raises(RunError) as caught:
        load_config("preset:tiny", plugins=(f"observer=trace,steps={steps}",))
    message = str(caught.value)
    assert message.startswith(f"observer.steps={steps}: it must be a step, as 5, or first-last, as 5-8")
    assert f"--plugin observer=trace,steps={steps}" in message
    assert caught.value.exit_code == ExitCode.INPUT


@pytest.mark.parametrize(("written", "steps"), [(7, "7"), ("7", "7"), ("7-9", "7-9"), (None, None)])
def test_a_file_may_write_a_number(written: object, steps: str | None) -> None:
    config = {"observer": {"use": ["trace"], "trace": {"steps": written}}}
    run = resolve(Request(configs=("preset:tiny", config)))
    (plugin,) = run.plugins["observer"]
    assert plugin.options == Options(steps=steps)


@pytest.mark.parametrize("written", [True, 7.5, [7], {"first": 7}])
def test_what_is_no_number_is_refused(written: object) -> None:
    config = {"observer": {"use": ["trace"], "trace": {"steps": written}}}
    with pytest.raises(RunError, match=r"observer\.steps"):
        resolve(Request(configs=("preset:tiny", config)))


def test_steps_that_the_run_never_comes_to_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    observers = Observers([("trace", Trace(Options(steps="41-50")))], logging.getLogger("test-trace"))
    with caplog.at_level(logging.WARNING):
        observers.on_train_start(example_run(tmp_path, steps=40))
    (message,) = caplog.messages
    assert "observer trace failed in on_train_start" in message
    assert "steps=41-50: this attempt has the steps 1 to 40" in message
    assert observers.traced_steps() == frozenset()


def test_steps_of_an_attempt_that_has_none_left_are_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps=5: this attempt has no steps left"):
        traced(tmp_path, "5", first_step=41)


def test_a_file_holds_the_step_as_it_ran_and_as_planned(tmp_path: Path) -> None:
    traced(tmp_path, "5").on_trace(example_trace(5))
    assert names(tmp_path / "trace") == ["step-5.json"]
    document = json.loads((tmp_path / "trace" / "step-5.json").read_text(encoding="utf-8"))
    check_document(document)
    assert titles(document) == ["step 5 as it ran: 62 ms, bubble 51.6%", "step 5 as planned: 60 ms, bubble 50.0%"]
    other = document["otherData"]
    assert (other["step"], other["clock_error_s"]) == (5, 1e-4)
    assert other["ran"]["makespan_s"] == pytest.approx(0.062)
    assert other["ran"]["bubble_fraction"] == pytest.approx(1 - 3 / 6.2)
    assert other["planned"]["makespan_s"] == pytest.approx(0.06)
    assert other["planned"]["busy_s"] == pytest.approx([0.03, 0.03])
    slices = [each for each in document["traceEvents"] if each["ph"] == "X" and each["pid"] == 0]
    assert [(each["tid"], each["name"], each["ts"], each["dur"]) for each in slices] == [
        (1, "F0.0", 0, pytest.approx(10_000)),
        (1, "B0.0", pytest.approx(42_000), pytest.approx(20_000)),
        (2, "F0.0", pytest.approx(11_000), pytest.approx(10_000)),
        (2, "I0.0", pytest.approx(21_000), pytest.approx(10_000)),
        (2, "W0.0", pytest.approx(31_000), pytest.approx(10_000)),
    ]


def test_the_events_have_the_form_of_schedule_show(tmp_path: Path) -> None:
    plan = next(iter(load_config("preset:tiny", plugins=("schedule=1f1b",)).plans.values()))
    shown = list(trace_events(timeline(plan).stages, plan.layout, title="shown"))
    written = step_document(example_trace(5))["traceEvents"]
    assert {(each["ph"], *sorted(each)) for each in written} == {(each["ph"], *sorted(each)) for each in shown}


def check_document(document: dict[str, Any]) -> None:
    """Two processes with the same bars, each arrow with a start and an end of its own."""
    events = document["traceEvents"]
    assert document["displayTimeUnit"] == "ms"
    ran, planned = ([each for each in events if each["pid"] == process] for process in (0, 1))
    assert len(ran) + len(planned) == len(events)
    for told in (slices_of, arrows_of, counters_of):
        assert told(ran) == told(planned)
        assert told(ran)
    ids = [each["id"] for each in events if each["ph"] == "s"]
    assert len(set(ids)) == len(ids)
    assert ids == [each["id"] for each in events if each["ph"] == "f"]


def tracks_of(events: list[Event]) -> list[tuple[Any, ...]]:
    return [(each["tid"], each["args"]["name"]) for each in events if each["name"] == "thread_name"]


def slices_of(events: list[Event]) -> list[tuple[Any, ...]]:
    return [(each["tid"], each["name"], each["cat"]) for each in events if each["ph"] == "X"]


def arrows_of(events: list[Event]) -> list[tuple[Any, ...]]:
    return [(each["ph"], each["tid"], each["name"], each["cat"]) for each in events if each["ph"] in "sf"]


def counters_of(events: list[Event]) -> list[tuple[Any, ...]]:
    return [(each["name"], each["args"]["activations"]) for each in events if each["ph"] == "C"]


def titles(document: dict[str, Any]) -> list[str]:
    return [each["args"]["name"] for each in document["traceEvents"] if each["name"] == "process_name"]


def test_a_later_attempt_leaves_the_files_of_the_first_alone(tmp_path: Path) -> None:
    traced(tmp_path, "5").on_trace(example_trace(5))
    first = (tmp_path / "trace" / "step-5.json").read_bytes()
    again = traced(tmp_path, "5-6", attempt=2)
    again.on_trace(example_trace(5))
    again.on_trace(example_trace(6))
    assert names(tmp_path / "trace") == ["step-5-attempt-2.json", "step-5.json", "step-6.json"]
    assert (tmp_path / "trace" / "step-5.json").read_bytes() == first
    for attempt in (1, 2):
        with pytest.raises(FileExistsError, match=r"step-5.*\.json exists: nothing is overwritten"):
            traced(tmp_path, "5", attempt=attempt).on_trace(example_trace(5))


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    create = SafeFolder.create

    def half(files: SafeFolder, name: str) -> NoReturn:
        with create(files, name) as file:
            file.write(b"{")
        raise OSError("no space left on device")

    with mock.patch.object(SafeFolder, "create", half), pytest.raises(OSError, match="no space left"):
        traced(tmp_path, "5").on_trace(example_trace(5))
    assert names(tmp_path / "trace") == []


@pytest.mark.multiproc
def test_the_command_traces_a_run(tmp_path: Path) -> None:
    words = ("preset:tiny", "--plugin", "schedule=interleaved", "--plugin", "observer=trace,steps=2-3")
    sets = ("run.folder=run", "run.threads=1", "train.steps=3", "eval.batches=1")
    done = forked_command((*words, *(word for each in sets for word in ("--set", each))), tmp_path)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert "observer trace" not in done.stdout + done.stderr
    assert names(tmp_path / "run" / "trace") == ["step-2.json", "step-3.json"]
    plan = resolve(Request(configs=("preset:tiny",), plugins=("schedule=interleaved",))).plans[4]
    for step in (2, 3):
        document = json.loads((tmp_path / "run" / "trace" / f"step-{step}.json").read_text(encoding="utf-8"))
        check_document(document)
        ran = [each for each in document["traceEvents"] if each["ph"] == "X" and each["pid"] == 0]
        for stage, actions in enumerate(plan.lists):
            assert [each["name"] for each in ran if each["tid"] == stage + 1] == [str(action) for action in actions]
        assert titles(document)[0].startswith(f"step {step} as it ran: ")
        assert 0 < document["otherData"]["planned"]["makespan_s"] < 60
    predicted = ["plan", "preset:tiny", "--plugin", "schedule=interleaved", "--set", "parallel.pipeline=2"]
    predicted += ["--set", "parallel.chunks=2", "--gpus", "2", "--as-is", "--timeline", str(tmp_path / "both.json")]
    assert main([*predicted, "--beside", str(tmp_path / "run" / "trace" / "step-3.json")]) == ExitCode.DONE
    events = json.loads((tmp_path / "both.json").read_text(encoding="utf-8"))["traceEvents"]
    ran, told = ([each for each in events if each["pid"] == process] for process in (0, 2))
    for form in (tracks_of, slices_of, arrows_of, counters_of):
        assert form(told) == form(ran)
