"""observer=profiler: the files of a real, profiled run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_run.errors import ExitCode, InputError, RunError
from megatron_run.planning import load_config
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.world import StopRequest, World
from megatron_run_engine.training.trainer import train_rank
from megatron_run_observer_profiler import Options, Profiler, check_device
from megatron_run_testing.observer import example_run, example_step, observer_checks
from tests.contracts.conformance import failures


def test_it_passes_its_kinds_suite() -> None:
    assert failures(observer_checks(lambda: Profiler(Options(steps="2-3")))) == {}


def test_a_profile_holds_the_operators_and_every_action_of_its_steps(tmp_path: Path) -> None:
    """Two of four steps of two microbatches: each forward and backward twice, and no other step's."""
    sets = ("train.steps=4", "train.global_batch_size=2", "train.micro_batch_size=1", "eval.interval=0")
    run = load_config("preset:tiny", sets=sets, plugins=("observer=profiler,steps=2-3",))
    # As a rank does, in this process: the profiler loads torch's compiler, for seconds, and only once here.
    assert train_rank(run, World(), RunFolder(tmp_path, 1, 0), StopRequest()) is ExitCode.DONE
    document = json.loads((tmp_path / "profile" / "steps-2-3-attempt-1.json").read_text())
    names = Counter(event["name"] for event in document["traceEvents"] if event.get("cat") == "user_annotation")
    assert {name: names[name] for name in ("F0.0", "F1.0", "B0.0", "B1.0", "F2.0")} == {
        "F0.0": 2,
        "F1.0": 2,
        "B0.0": 2,
        "B1.0": 2,
        "F2.0": 0,
    }
    assert any(event["name"] == "aten::addmm" or event["name"] == "aten::mm" for event in document["traceEvents"])
    assert "Self CPU" in (tmp_path / "profile" / "steps-2-3-attempt-1.txt").read_text()


def test_steps_after_the_end_are_refused_before_the_run() -> None:
    with pytest.raises(RunError, match=r"observer\.profiler\.steps=21-30: the run ends with step 20"):
        load_config("preset:tiny", plugins=("observer=profiler,steps=21-30",))


def test_a_resumed_run_profiles_what_is_left_of_the_steps(tmp_path: Path) -> None:
    observer = Profiler(Options(steps="1-3"))
    observer.on_train_start(example_run(tmp_path, attempt=2, first_step=3))
    observer.on_step_end(example_step(3))
    assert [path.name for path in (tmp_path / "profile").glob("*.json")] == ["steps-3-attempt-2.json"]


def test_an_attempt_without_these_steps_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"steps=1-2: this attempt has the steps 3 to 4"):
        Profiler(Options(steps="1-2")).on_train_start(example_run(tmp_path, attempt=2, first_step=3))


def test_an_error_keeps_what_was_recorded(tmp_path: Path) -> None:
    observer = Profiler(Options(steps="1-9"))
    observer.on_train_start(example_run(tmp_path))
    observer.on_step_end(example_step(1))
    observer.on_error(RuntimeError("a rank died"))
    assert json.loads((tmp_path / "profile" / "steps-1-4-attempt-1.json").read_text())["traceEvents"]


@pytest.mark.parametrize("option", ["memory", "nvtx"])
def test_what_records_a_gpu_is_refused_without_one(option: str) -> None:
    with pytest.raises(InputError, match=f"{option}=true"):
        check_device("cpu", Options.model_validate({option: True}))
    check_device("cuda:0", Options.model_validate({option: True}))
