"""A run that goes on with other values: more steps, another rate, another batch, other data; and branches of a run."""

from __future__ import annotations

import json
import logging
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_run.errors import CheckpointError, ExitCode, InputError, Problems
from megatron_run.planning import ResolvedRun, load_config
from megatron_run_engine.builtin.observer.jsonl import JsonLines
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.run_folder import check_run_folder, open_run_folder
from megatron_run_engine.run_folder.history import History
from megatron_run_engine.training.state.init_from import check_source
from megatron_run_testing.observer import example_run, example_step
from tests.support.resuming import SMALL, Attempt, attempt, only_step
from tests.support.saved_steps import read_all, same_state

#: Nothing in it depends on the length of the run.
STEADY: dict[str, Any] = {
    **SMALL,
    "train.steps": 4,
    "train.lr_shape": "constant",
    "train.lr_warmup": 2,
    "model.dropout": 0.1,
    "checkpoint.interval": 2,
    "checkpoint.keep": 9,
}
LONGER = {**STEADY, "train.steps": 8}


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Attempt]:
    """A run that had 8 steps from the start."""
    folder = tmp_path_factory.mktemp("longer")
    return folder, attempt(folder, LONGER)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps."""
    folder = tmp_path_factory.mktemp("short")
    attempt(folder, STEADY)
    return folder


def copied(folder: Path, target: Path) -> Path:
    return only_step(folder, 4, target / "run")


def bits(folder: Path, step: int = 8) -> Any:
    return read_all(Checkpoints(folder / "checkpoints"), step)


def test_an_extended_run_is_the_one_that_was_longer_from_the_start(
    short: Path, longer: tuple[Path, Attempt], tmp_path: Path
) -> None:
    run = copied(short, tmp_path)
    extended = attempt(run, LONGER, extend=True)
    assert extended.numbers == {step: longer[1].numbers[step] for step in range(5, 9)}
    assert same_state(bits(run), bits(longer[0]))


def test_a_branch_is_the_continuation_in_a_folder_of_its_own(longer: tuple[Path, Attempt], tmp_path: Path) -> None:
    source, whole = longer
    before = sorted(str(path) for path in source.rglob("*"))
    branched = attempt(tmp_path, {**LONGER, "run.branch_from": f"{source}@4"})
    assert branched.numbers == {step: whole.numbers[step] for step in range(5, 9)}
    assert same_state(bits(tmp_path), bits(source))
    assert sorted(str(path) for path in source.rglob("*")) == before
    again = attempt(tmp_path, {**LONGER, "train.steps": 9, "run.branch_from": f"{source}@4"}, extend=True)
    assert again.first == 9  # from its own newest step, no longer from the branch


def test_a_branch_that_ends_before_it_begins_is_refused_before_anything_starts(longer: tuple[Path, Attempt]) -> None:
    for steps in (3, 4):
        run = load_config("preset:tiny", sets={**LONGER, "train.steps": steps, "run.branch_from": f"{longer[0]}@4"})
        with pytest.raises(InputError) as error:
            check_source(run)
        assert str(error.value).startswith(
            f"nothing is left to train: run.branch_from is at step 4, and this run ends at {steps} (from "
        )
    check_source(load_config("preset:tiny", sets={**LONGER, "train.steps": 5, "run.branch_from": f"{longer[0]}@4"}))


def test_a_wsd_run_is_branched_for_its_decay(tmp_path: Path) -> None:
    wsd = {**STEADY, "train.steps": 20, "train.lr_shape": "wsd", "train.lr_wsd": 2, "train.lr_wsd_shape": "linear"}
    attempt(tmp_path / "run", wsd, stop_after=4)
    decay = {**wsd, "train.steps": 8, "train.lr_wsd": 4, "run.branch_from": f"{tmp_path / 'run'}@step4"}
    rates = [numbers["lr"] for numbers in attempt(tmp_path / "branch", decay).numbers.values()]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_another_rate_applies_from_the_next_step_and_moments_go_on(
    short: Path, longer: tuple[Path, Attempt], tmp_path: Path
) -> None:
    halved = {**LONGER, "train.lr": 5e-4}
    changed = attempt(copied(short, tmp_path), halved, allow_change=("train.lr",), extend=True).numbers
    before = longer[1].numbers
    assert [numbers["lr"] for numbers in changed.values()] == [5e-4] * 4
    assert changed[5]["loss"] == before[5]["loss"]  # the weights and samples are those of the run
    assert changed[6]["loss"] != before[6]["loss"]


@pytest.mark.parametrize("length", [{"train.steps": 8}, {"train.steps": None, "train.samples": 4 * 4 + 4 * 8}])
def test_another_batch_goes_on_at_the_same_sample(length: dict[str, Any], short: Path, tmp_path: Path) -> None:
    sets = {**STEADY, **length, "train.global_batch_size": 8, "train.lr_shape": "linear"}
    allowed = ("train.global_batch_size", "train.lr_shape", "train.steps", "train.samples")
    numbers = attempt(copied(short, tmp_path), sets, allow_change=allowed).numbers
    assert [each["samples"] for each in numbers.values()] == [24, 32, 40, 48]
    ends = 16 + 4 * 8  # the decay ends where the run does
    warm = 2 * 8
    assert [each["lr"] for each in numbers.values()] == pytest.approx(
        [1e-3 * (1 - (at - warm) / (ends - warm)) for at in (16, 24, 32, 40)]
    )


def test_other_data_need_permission(short: Path, tmp_path: Path) -> None:
    run, other = copied(short, tmp_path), {**LONGER, "data.samples": 100}
    with pytest.raises(CheckpointError, match=r"allow-change data.samples,train.steps"):
        attempt(run, other)
    with pytest.raises(CheckpointError, match=r"allow-change data.samples"):
        attempt(run, other, extend=True)
    assert attempt(run, other, allow_change=("data", "train.steps")).first == 5


@pytest.mark.parametrize(
    ("sets", "names"),
    [
        ({"model.hidden_size": 32}, "run.init_from"),
        ({"train.sequence_length": 4}, "run.init_from"),
        ({"optimizer.rule": "sgd"}, "--allow-plugin-change optimizer"),
    ],
)
def test_what_gives_the_state_its_meaning_never_changes(
    sets: dict[str, Any], names: str, short: Path, tmp_path: Path
) -> None:
    (key,) = sets
    run = copied(short, tmp_path)
    with pytest.raises(CheckpointError) as error:
        attempt(run, {**STEADY, **sets}, allow_change=(key,))
    assert names in str(error.value)
    with pytest.raises(CheckpointError, match="belongs to another run"):
        check_source(load_config("preset:tiny", sets={**STEADY, **sets, "run.branch_from": str(run)}))


def test_the_folder_refuses_asks_and_remembers(tmp_path: Path) -> None:
    def opened(asked: dict[str, Any], **sets: Any) -> Any:
        run = load_config("preset:tiny", sets={**STEADY, "run.folder": tmp_path, **sets})
        found = open_run_folder(replace(run, request=replace(run.request, **asked)))
        if not found.finished:
            found.folder.begin(4)
        found.lock.release()
        return found

    def refused(asked: dict[str, Any], **sets: Any) -> str:
        with pytest.raises(InputError) as error:
            opened(asked, **sets)
        return str(error.value)

    opened({}).folder.end(ExitCode.DONE)
    (tmp_path / "metrics.jsonl").touch()
    assert opened({}).finished
    said = refused({}, **{"train.steps": 8})
    assert "train.steps=4, now 8" in said
    assert "to end where it would have: --set train.steps=4; to train on: --extend" in said
    assert "run.init_from" in said
    assert "--extend" not in refused({"extend": True}, **{"train.steps": 3})
    assert "did you mean 'train.lr'" in refused({"allow_change": ("trian.lr",)})
    assert "--allow-change train.lr" in refused({"extend": True}, **{"train.steps": 8, "train.lr": 0.5})
    extended = opened({"extend": True}, **{"train.steps": 8})
    assert not extended.finished
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["attempts"][-1]["changes"] == {"train.steps": [4, 8]}
    assert extended.folder.changed_keys == {"train.steps"}
    opened({}, **{"train.steps": 8})  # allowed once: the run now has 8 steps
    assert "train.steps=8, now 4" in refused({})


def test_what_an_end_that_is_too_early_is_told_to_type_is_accepted(short: Path, tmp_path: Path) -> None:
    open_run_folder(load_config("preset:tiny", sets={**LONGER, "run.folder": tmp_path / "run"})).lock.release()
    shutil.copytree(short / "checkpoints", tmp_path / "run" / "checkpoints")

    def check(sets: dict[str, Any], *allowed: str) -> None:
        run = load_config("preset:tiny", sets={**LONGER, **sets, "run.folder": tmp_path / "run"})
        check_run_folder(replace(run, request=replace(run.request, allow_change=allowed)))

    for sets in ({"train.steps": 3}, {"train.steps": None, "train.samples": 15}):
        with pytest.raises(InputError, match="ends before step 4") as error:
            check(sets)
        typed = re.search(r"the least is --set (\S+)=(\d+) --allow-change (\S+);", str(error.value))
        assert typed, str(error.value)
        check({**sets, typed[1]: int(typed[2])}, *typed[3].split(","))


@pytest.mark.parametrize(
    ("sets", "asked", "said"),
    [
        (
            {"train.steps": 3},
            {},
            "train.steps=3 ends before step 4, .*: it has 4 steps .*--set train.steps=4",
        ),
        ({"train.steps": 3}, {"extend": True}, r"to end there, branch .*--set run\.branch_from=.*run@2$"),
        ({"train.steps": 1}, {}, "least is --set train.steps=4$"),
        ({"train.steps": None, "train.samples": 15}, {}, "train.samples=15 ends .* 16 samples .*train.samples=16"),
        ({"train.steps": 1}, {"resume": "2"}, "train.steps=1 ends before step 2, "),
        ({"train.steps": 3}, {"resume": "2"}, ""),
        ({"train.steps": 3}, {"resume": "never"}, ""),
        ({"train.steps": 4}, {}, ""),
    ],
)
def test_no_permission_makes_a_run_shorter_than_it_has_trained(
    sets: dict[str, Any], asked: dict[str, Any], said: str, short: Path, tmp_path: Path
) -> None:
    run = load_config("preset:tiny", sets={**LONGER, "run.folder": tmp_path / "run"})
    open_run_folder(run).lock.release()
    shutil.copytree(short / "checkpoints", tmp_path / "run" / "checkpoints")
    now = load_config("preset:tiny", sets={**LONGER, **sets, "run.folder": tmp_path / "run"})
    now = replace(now, request=replace(now.request, allow_change=("train.steps", "train.samples"), **asked))
    with pytest.raises(InputError, match=said) if said else nullcontext():
        check_run_folder(now)
    with pytest.raises(InputError, match=said) if said else nullcontext():
        open_run_folder(now).lock.release()


def test_an_attempt_that_saved_nothing_needs_no_second_permission(short: Path, tmp_path: Path) -> None:
    run = copied(short, tmp_path)
    record = {"id": "0" * 32, "attempts": [{}, {"changes": {"train.steps": [4, 8]}}]}
    (run / "run.json").write_text(json.dumps(record))
    assert attempt(run, LONGER).first == 5


def test_a_change_is_told_with_the_rate_that_it_moves(
    short: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    linear = {**STEADY, "train.lr_shape": "linear"}
    attempt(tmp_path, linear)
    with caplog.at_level(logging.WARNING, "megatron_run"):
        attempt(tmp_path, {**linear, "train.steps": 8, "observer.use": "jsonl"}, extend=True)
    assert "train.steps=4, now 8" in caplog.messages
    assert "the learning rate of step 5 would have been 0 and is 0.000667" in caplog.messages


def test_changes_stand_beside_the_numbers_of_the_first_step_that_has_them(tmp_path: Path) -> None:
    run = replace(example_run(tmp_path, attempt=2), first_step=5, resumed=tmp_path, changes={"train.lr": (1.0, 2.0)})
    for attempt_, steps in ((example_run(tmp_path), [4]), (run, [5, 6])):
        observer = JsonLines()
        observer.on_train_start(attempt_)
        for step in steps:
            observer.on_step_end(example_step(step))
        observer.on_train_end("finished")
    assert History(tmp_path).losses == [2.25, 2.25, 2.25]
    assert History(tmp_path).metrics["step"] == [4, 5, 6]
    assert "changes" not in History(tmp_path).metrics
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 5, 6], "no line repeats a step without its numbers"
    assert all(line["loss"] == 2.25 for line in lines)
    assert [line.get("changes") for line in lines] == [None, {"train.lr": [1.0, 2.0]}, None]
    assert (lines[1]["attempt"], lines[1]["resumed"]) == (2, str(tmp_path))


def test_lines_of_changes_alone_in_folders_of_early_versions_are_no_steps(tmp_path: Path) -> None:
    lines = [{"step": 4, "loss": 2.0}, {"step": 4, "changes": {"train.steps": [4, 8]}}, {"step": 5, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert History(tmp_path).losses == [2.0, 1.0]


def test_removals_are_told_once_and_every_nth_step_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sets = {**LONGER, "checkpoint.interval": 1, "checkpoint.keep": 2, "checkpoint.keep_every": 3}
    with caplog.at_level(logging.WARNING, "megatron_run"):
        attempt(tmp_path, sets)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [3, 6, 7, 8]
    assert [text for text in caplog.messages if "removed" in text] == [
        "step 1 is removed, and so on: checkpoint.keep=2 newest stay, checkpoint.keep_every=N keeps others"
    ]


@pytest.mark.parametrize("key", ["init_from", "branch_from"])
def test_a_step_that_is_gone_is_refused_with_those_that_are_there(key: str, short: Path, tmp_path: Path) -> None:
    gone = {"init_from": str(short / "checkpoints" / "step3"), "branch_from": f"{short}@3"}[key]
    with pytest.raises(CheckpointError, match="saved steps: 2, 4"):
        check_source(load_config("preset:tiny", sets={**STEADY, f"run.{key}": gone}))


def test_a_step_to_resume_that_is_not_there_is_refused_before_a_model_is_built(short: Path, tmp_path: Path) -> None:
    def resuming(folder: Path, step: str) -> ResolvedRun:
        run = load_config("preset:tiny", sets={**STEADY, "run.folder": str(folder)})
        return replace(run, request=replace(run.request, resume=step))

    with pytest.raises(CheckpointError, match="step20; saved steps: 2, 4"):
        check_source(resuming(short, "20"))
    for resume in ("4", "auto", "never"):
        check_source(resuming(short, resume))
    check_source(resuming(tmp_path, "20"))  # that there is no run is said where one is opened


def test_two_sources_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(Problems, match="keep one"):
        load_config("preset:tiny", sets={"run.init_from": str(tmp_path), "run.branch_from": str(tmp_path)})
