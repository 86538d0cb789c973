from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import pytest

from megatron_run.errors import CheckpointError, ExitCode, InputError
from megatron_run.files.latest_run import follow_latest
from megatron_run.files.safe_folder import SafeFolder
from megatron_run.planning import ResolvedRun, load_config
from megatron_run.planning.run import comparison_table
from megatron_run_engine.run_folder import (
    FolderLock,
    OpenedFolder,
    RunFolder,
    join_run_folder,
    open_run_folder,
    records,
)
from tests.support.installed import found_once


@pytest.fixture(scope="module", autouse=True)
def _looked_up_once() -> Iterator[None]:
    """What is installed and what describes this machine, a tenth of a second each time that a folder is opened."""
    with (
        found_once(),
        mock.patch.object(records, "environment_record", cache(records.environment_record)),
        mock.patch.object(records, "git_record", cache(records.git_record)),
    ):
        yield


def tiny(path: Path | None = None, **sets: Any) -> ResolvedRun:
    chosen = {key.replace("__", "."): value for key, value in sets.items()}
    return load_config("preset:tiny", sets={"run.folder": path, **chosen} if path else chosen)


def opened(run: ResolvedRun, *arguments: str) -> OpenedFolder:
    """Open, begin and let go, as a job that has ended."""
    result = open_run_folder(run, arguments)
    if not result.finished:
        result.folder.begin(0)
    result.lock.release()
    return result


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_an_absent_folder_is_created_and_described(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    result = opened(tiny(path), "preset:tiny")
    assert (result.folder.path, result.folder.attempt, result.finished) == (path, 1, False)
    assert result.folder.log(3) == path / "logs" / "attempt-001" / "rank-00003.log"
    record = read(path / "run.json")
    assert record["attempts"][0]["arguments"] == ["preset:tiny"]
    assert record["identity"]["train.lr"] == 1e-3
    assert read(path / "plan.json")["plugins"]["schedule"][0]["name"] == "sequential"
    assert "torch" in read(path / "environment.json")["packages"]
    assert read(path / "status.json")["state"] == "starting"


def test_broken_metadata_is_left_out_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    raises = type("Raises", (), {"metadata": property(mock.Mock(side_effect=FileNotFoundError))})  # as a backport
    monkeypatch.setattr(records, "distributions", lambda: [raises(), mock.Mock(metadata={}), *distributions()])
    assert records.environment_record.__wrapped__()["packages"].keys() >= {"torch"}  # type: ignore[attr-defined]


def test_the_written_configuration_resolves_to_the_same_run(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", train__lr=0.5)
    result = opened(run)
    assert comparison_table(load_config(result.folder.path / "config.yaml")) == comparison_table(run)


@pytest.mark.parametrize("rule", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("preset", ["tiny", "laptop"])
def test_the_written_configuration_says_nothing_that_the_first_did_not(tmp_path: Path, preset: str, rule: str) -> None:
    run = load_config(f"preset:{preset}", sets={"run.folder": tmp_path / "run", "optimizer.rule": rule})
    again = load_config(opened(run).folder.path / "config.yaml")
    assert set(again.notices) <= set(run.notices)


def test_without_a_name_a_new_folder_is_made_and_latest_points_at_the_last_that_took_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = opened(tiny()).folder, opened(tiny()).folder
    assert first.path != second.path
    assert first.path.parent == second.path.parent == tmp_path / "runs"
    latest = tmp_path / "runs" / "latest"
    assert not latest.exists(), "a run that ends at its start is nothing to look at"
    second.heartbeat(1)
    RunFolder(first.path, 1, rank=1).heartbeat(1)
    assert follow_latest(latest) == second.path, "rank 0 alone writes"
    opened(tiny(tmp_path / "runs" / "mine")).folder.heartbeat(1)
    assert follow_latest(latest) == second.path, "a run with a name is found by it"
    first.heartbeat(1)
    assert follow_latest(latest) == first.path


def test_latest_stands_for_the_run_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = opened(tiny()).folder
    first.heartbeat(1)
    again = opened(tiny(Path("runs/latest"))).folder
    assert (again.path, again.attempt) == (first.path, 2)
    assert load_config("runs/latest/config.yaml").config.run.folder == Path("runs", first.path.name), "not latest"
    for key, word in (("init_from", "runs/latest"), ("branch_from", "runs/latest@3")):
        named = load_config("preset:tiny", sets={f"run.{key}": word}).config.run
        assert str(getattr(named, key)) == word.replace("latest", first.path.name)


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert opened(tiny(tmp_path)).folder.attempt == 1


def test_the_same_run_is_another_attempt_and_overwrites_nothing(tmp_path: Path) -> None:
    opened(tiny(tmp_path))
    before = {path: path.read_bytes() for path in (tmp_path / "logs").rglob("*.*")}
    second = opened(tiny(tmp_path, run__threads=1), "again").folder
    assert second.attempt == 2
    assert (tmp_path / "logs" / "attempt-002" / "config.yaml").exists()
    assert [each["arguments"] for each in read(tmp_path / "run.json")["attempts"]] == [[], ["again"]]
    assert before
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize(
    "change",
    [
        {"parallel__data": 1},
        {"eval__interval": 3},
        {"observer__use": "jsonl"},
        {"train__max_skips": 99},
        {"train__recompute": "full"},
    ],
)
def test_where_how_and_who_watches_do_not_make_another_run(tmp_path: Path, change: dict[str, Any]) -> None:
    opened(tiny(tmp_path))
    (tmp_path / "metrics.jsonl").touch()  # before its first step any run may be corrected
    assert opened(tiny(tmp_path, **change)).folder.attempt == 2


def test_a_run_that_ended_before_its_first_step_may_be_corrected(tmp_path: Path) -> None:
    opened(tiny(tmp_path, data__use="text", data__paths="nothere"))
    assert opened(tiny(tmp_path, data__use="text", data__paths="there")).folder.attempt == 2
    (tmp_path / "checkpoints" / "step00000001").mkdir(parents=True)
    with pytest.raises(InputError, match=r"belongs to another run: data\.paths="):
        opened(tiny(tmp_path, data__use="text", data__paths="nothere"))


def test_another_run_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    opened(tiny(tmp_path))
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(InputError) as caught:
        opened(tiny(tmp_path, train__lr=0.5, model__num_layers=2))
    assert caught.value.exit_code == ExitCode.INPUT
    assert str(caught.value) == (
        f"run folder {tmp_path} belongs to another run: model.num_layers=4, now 2; what is saved has no meaning "
        "under other values: give the same; for a new run from its weights: another run.folder with "
        f"--set run.init_from={tmp_path}"
    )


def test_an_attempt_that_was_killed_before_it_was_recorded_stands_in_nobodys_way(tmp_path: Path) -> None:
    opened(tiny(tmp_path))
    (attempt := tmp_path / "logs" / "attempt-002").mkdir()
    (attempt / "config.yaml").write_text("model: {num_la")
    assert opened(tiny(tmp_path)).folder.attempt == 2
    assert comparison_table(load_config(attempt / "config.yaml")) == comparison_table(tiny(tmp_path))


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    opened(tiny(tmp_path)).folder.end(ExitCode.DONE)
    result = opened(tiny(tmp_path))
    assert result.finished
    assert read(tmp_path / "status.json")["state"] == "finished"
    assert len(read(tmp_path / "run.json")["attempts"]) == 1


@pytest.mark.parametrize("word", ["never", "2"])
def test_a_finished_run_goes_on_from_the_step_that_is_named(tmp_path: Path, word: str) -> None:
    run = tiny(tmp_path)
    opened(run).folder.end(ExitCode.DONE)
    result = opened(replace(run, request=replace(run.request, resume=word)))
    assert (result.finished, result.folder.attempt) == (False, 2)


@pytest.mark.parametrize("content", ["results.txt", "run.json"])
def test_a_folder_that_is_no_run_folder_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / content).write_text("mine")
    with pytest.raises(InputError, match="is not a run folder"):
        open_run_folder(tiny(tmp_path))
    assert (tmp_path / content).read_text() == "mine"


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is not a run folder: it is a file"):
        open_run_folder(tiny(tmp_path / "file"))


def test_a_link_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "target").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "target")
    with pytest.raises(InputError, match=r"it is a symbolic link to .*target"):
        open_run_folder(tiny(tmp_path / "link"))
    assert not list((tmp_path / "elsewhere" / "target").iterdir())


def test_logs_that_are_a_link_are_refused(tmp_path: Path) -> None:
    opened(tiny(tmp_path / "run"))
    (tmp_path / "run" / "logs").rename(tmp_path / "moved")
    (tmp_path / "run" / "logs").symlink_to(tmp_path / "moved")
    with pytest.raises(InputError, match=r"it is a symbolic link: .*logs"):
        open_run_folder(tiny(tmp_path / "run"))


@pytest.mark.parametrize(("number", "text"), [(errno.ENOSPC, "No space left"), (errno.EROFS, "Read-only file system")])
def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, text: str
) -> None:
    def refuse(folder: SafeFolder, name: str, mode: int = 0) -> BinaryIO:
        raise OSError(number, os.strerror(number), str(folder.path / name))

    run = tiny(tmp_path)
    monkeypatch.setattr(SafeFolder, "create", refuse)
    with pytest.raises(InputError) as caught:
        open_run_folder(run)
    assert str(caught.value).startswith(f"run folder {tmp_path} cannot be used: {text}")
    assert "\n" not in str(caught.value)


def test_a_refused_folder_is_not_kept_locked(tmp_path: Path) -> None:
    opened(tiny(tmp_path))
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(InputError, match="another run"):
        open_run_folder(tiny(tmp_path, train__lr=0.5))
    FolderLock(tmp_path).release()


def test_two_jobs_cannot_share_a_folder(tmp_path: Path) -> None:
    with open_run_folder(tiny(tmp_path)).lock, pytest.raises(InputError, match=f"process {os.getpid()} on .* writes"):
        open_run_folder(tiny(tmp_path))


def test_another_host_finds_the_folder_that_rank_0_opened(tmp_path: Path) -> None:
    result = opened(tiny(tmp_path))
    joined = join_run_folder(tmp_path, 1, result.run_id, rank=3, wait=0)
    joined.heartbeat(5)
    assert (joined.attempt, read(tmp_path / "status.json")["step"]) == (1, 0)


@pytest.mark.parametrize(("attempt", "run_id"), [(1, "another"), (2, None)])
def test_a_folder_that_is_not_shared_is_an_error(tmp_path: Path, attempt: int, run_id: str | None) -> None:
    result = opened(tiny(tmp_path))
    with pytest.raises(InputError, match="is not shared by all hosts"):
        join_run_folder(tmp_path, attempt, run_id or result.run_id, rank=1, wait=0)


@pytest.mark.parametrize(
    ("code", "state", "retry"),
    [
        (ExitCode.DONE, "finished", False),
        (ExitCode.SIGTERM, "stopped", True),
        (ExitCode.SIGINT, "stopped", False),
        (ExitCode.RANK_LOST, "failed", True),
        (ExitCode.INPUT, "failed", False),
    ],
)
def test_the_status_says_how_it_ended_and_whether_to_try_again(
    tmp_path: Path, code: ExitCode, state: str, retry: bool
) -> None:
    run_folder = RunFolder(tmp_path, 2)
    run_folder.heartbeat(7)
    run_folder.end(code, "why")
    status = read(tmp_path / "status.json")
    del status["heartbeat"]
    expected = {"state": state, "step": 7, "attempt": 2, "exit_code": int(code), "retry": retry, "message": "why"}
    assert status == expected


def test_a_heartbeat_touches_the_disk_once_a_second_and_the_last_step_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    run_folder = RunFolder(tmp_path, 1)
    steps = []
    for step in range(1, 8):
        run_folder.heartbeat(step)
        steps.append(read(tmp_path / "status.json")["step"])
        now[0] += 0.4
    assert steps == [1, 1, 1, 4, 4, 4, 7]
    run_folder.heartbeat(8)
    run_folder.flush()
    assert read(tmp_path / "status.json")["step"] == 8


def test_whoever_reads_a_status_while_it_changes_reads_a_whole_one(tmp_path: Path) -> None:
    folder = opened(tiny(tmp_path / "run")).folder
    with (folder.path / "status.json").open(encoding="utf-8") as begun:
        folder.end(ExitCode.DONE)
        assert json.load(begun)["state"] == "starting"
    assert read(folder.path / "status.json")["state"] == "finished"


def test_a_full_disk_does_not_stop_the_heartbeat(tmp_path: Path) -> None:
    RunFolder(tmp_path / "gone", 1).heartbeat(1)
    assert not (tmp_path / "gone").exists()


def test_a_folder_that_was_moved_meanwhile_ends_in_a_line(tmp_path: Path) -> None:
    folder = opened(tiny(tmp_path / "here")).folder
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(CheckpointError, match=r"the run folder .*here is gone: .*run.folder where it is now") as caught:
        folder.end(ExitCode.DONE)
    assert "\n" not in str(caught.value)


def test_an_end_that_cannot_be_recorded_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = opened(tiny(tmp_path)).folder

    def refuse(_: SafeFolder, name: str, mode: int = 0) -> BinaryIO:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), name)

    monkeypatch.setattr(SafeFolder, "create", refuse)
    with pytest.raises(CheckpointError, match=r"ended is not recorded: .*quota.*status\.json"):
        folder.end(ExitCode.DONE)


def test_a_folder_of_an_older_version_is_joined_and_its_added_options_are_kept_to_their_defaults(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    opened(tiny(path))
    record = read(path / "run.json")
    added = {"model.attention.window", "model.rope.theta"}  # the folder's writer had neither
    assert added <= record["identity"].keys()
    record["identity"] = {key: value for key, value in record["identity"].items() if key not in added}
    (path / "run.json").write_text(json.dumps(record))
    assert opened(tiny(path)).folder.attempt == 2
    assert read(path / "run.json")["attempts"][1]["changes"] == {}
    (path / "metrics.jsonl").touch()
    with pytest.raises(InputError, match=r"model.attention.window=unset, now 4"):
        opened(tiny(path, model__attention__window=4))
