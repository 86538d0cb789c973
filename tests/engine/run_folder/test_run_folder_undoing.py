"""What a start that is refused leaves behind: nothing; and what an attempt that begins makes of the run."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_run.errors import ExitCode, InputError
from megatron_run.files.safe_folder import SafeFolder
from megatron_run.planning import ResolvedRun, load_config
from megatron_run_engine.run_folder import FolderLock, OpenedFolder, RunFolder, open_run_folder
from megatron_run_engine.run_folder.folder import DESCRIPTION, last_config
from megatron_run_engine.run_folder.permissions import with_granted


@pytest.fixture(autouse=True)
def _quick_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """What describes the machine takes long to find out, and says nothing here."""
    for name in ("environment_record", "git_record"):
        monkeypatch.setattr(f"megatron_run_engine.run_folder.records.{name}", dict)


def tiny(path: Path | None, **asked: Any) -> ResolvedRun:
    steps = asked.pop("steps", 5)
    run = load_config("preset:tiny", sets={"train.steps": steps, **({"run.folder": path} if path else {})})
    return replace(run, request=replace(run.request, **asked))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has finished."""
    with open_run_folder(tiny(tmp_path / "run")).lock:
        folder = RunFolder(tmp_path / "run", 1)
        folder.begin(0)
        (folder.path / "metrics.jsonl").touch()
        folder.end(ExitCode.DONE)
    return tmp_path / "run"


def extended(run: Path) -> OpenedFolder:
    return open_run_folder(tiny(run, steps=9, extend=True))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def steps(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("  steps:"))


@pytest.mark.parametrize("code", [ExitCode.INPUT, ExitCode.DATA])
def test_a_refusal_leaves_the_run_as_it_was(run: Path, code: ExitCode) -> None:
    before = contents(run)
    with (opened := extended(run)).lock:
        assert opened.end(code, "the training data is not what it was")
    status = json.loads(before.pop("status.json"))
    assert json.loads((run / "status.json").read_text()) == status | {
        "exit_code": int(code),
        "retry": False,
        "message": "the training data is not what it was",
    }, "a script that starts it again by what this says must not go on for ever"
    after = contents(run)
    del after["status.json"]
    assert after == before
    with (again := open_run_folder(tiny(run))).lock:
        assert again.finished


def test_a_killed_run_whose_next_start_is_refused_has_failed(run: Path) -> None:
    with open_run_folder(tiny(run, resume="3")).lock:
        RunFolder(run, 2).begin(3)
    with (opened := open_run_folder(tiny(run))).lock:
        opened.end(ExitCode.DATA, "why")
    status = RunFolder(run, 2).read_status()
    assert status is not None
    assert (status.state, status.attempt, status.step, status.exit_code) == ("failed", 2, 3, 5)


def test_until_an_attempt_begins_the_run_is_what_it_was(run: Path) -> None:
    named = ("run.json", *DESCRIPTION)
    before = {name: (run / name).read_bytes() for name in named}
    with (opened := extended(run)).lock:
        assert {name: (run / name).read_bytes() for name in named} == before
        opened.folder.begin(5)
        record = json.loads((run / "run.json").read_text())
    assert record["identity"]["train.steps"] == 9
    assert record["attempts"][1]["changes"] == {"train.steps": [5, 9]}
    status = opened.folder.read_status()
    assert status is not None
    assert (status.state, status.step) == ("starting", 5), "the step from which it goes on"


def test_the_configuration_is_that_of_the_attempt_that_began_last(run: Path) -> None:
    assert steps((run / "config.yaml").read_text()) == "  steps: 5"
    with (opened := extended(run)).lock:
        opened.folder.begin(5)
    assert steps((run / "config.yaml").read_text()) == "  steps: 9"
    assert steps((run / "logs" / "attempt-001" / "config.yaml").read_text()) == "  steps: 5"
    found = last_config(run)
    assert found is not None
    assert found.path == run / "config.yaml"


def test_a_folder_of_an_early_version_keeps_what_describes_its_first_attempt(run: Path) -> None:
    kept = {name: (run / "logs" / "attempt-001" / name) for name in DESCRIPTION}
    before = {name: path.read_bytes() for name, path in kept.items()}
    for path in kept.values():
        path.unlink()
    with (opened := extended(run)).lock:
        opened.folder.begin(5)
    assert {name: path.read_bytes() for name, path in kept.items()} == before


@pytest.mark.parametrize("code", [ExitCode.RANK_LOST, ExitCode.OUT_OF_MEMORY, ExitCode.BUG, ExitCode.SIGTERM])
def test_an_attempt_that_failed_before_it_began_is_one_and_changes_nothing_of_the_run(
    run: Path, code: ExitCode
) -> None:
    with (opened := extended(run)).lock:
        assert not opened.end(code, "why")
    record = json.loads((run / "run.json").read_text())
    assert record["identity"]["train.steps"] == 5
    assert [each["changes"] for each in record["attempts"]] == [{}, {}]
    with (again := extended(run)).lock:
        assert again.folder.attempt == 3


def test_what_is_refused_after_it_began_keeps_its_logs(run: Path) -> None:
    with (opened := extended(run)).lock:
        opened.folder.begin(5)
        assert not opened.end(ExitCode.DATA, "a damaged document")
    status = opened.folder.read_status()
    assert status is not None
    assert (status.state, status.step, status.attempt) == ("failed", 5, 2)


@pytest.mark.parametrize("named", [True, False])
def test_a_folder_that_a_refused_start_has_made_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    with (opened := open_run_folder(tiny(tmp_path / "a" / "b" if named else None))).lock:
        assert opened.end(ExitCode.DATA, "the data is missing")
    assert not list(tmp_path.iterdir())


def test_what_somebody_else_has_put_there_stays(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with (opened := open_run_folder(tiny(tmp_path / "a" / "run"))).lock:
        (tmp_path / "a" / "run" / "notes.txt").write_text("mine")
        opened.end(ExitCode.DATA, "the data is missing")
    assert [path.name for path in (tmp_path / "a" / "run").iterdir()] == ["notes.txt"]


def test_a_folder_that_was_there_stays_and_is_empty(tmp_path: Path) -> None:
    with (opened := open_run_folder(tiny(tmp_path))).lock:
        opened.end(ExitCode.INPUT, "why")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_with_keep_the_logs_of_a_refused_start_stay(run: Path) -> None:
    with (opened := extended(run)).lock:
        assert not opened.end(ExitCode.DATA, "why", keep=True)
    assert (run / "logs" / "attempt-002").is_dir()


def test_an_opening_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_run_engine.run_folder.opening.write_records", refuse)
    with pytest.raises(InputError, match="No space left"):
        open_run_folder(tiny(tmp_path / "run"))
    assert not list(tmp_path.iterdir())


def test_a_run_keeps_what_an_attempt_that_began_was_allowed_and_from_which_step(run: Path) -> None:
    with (opened := open_run_folder(tiny(run, steps=9, extend=True, allow_change=("data",)))).lock:
        opened.end(ExitCode.RANK_LOST, "before it began")
    asked = {"allow_change": ("train.lr",), "allow_plugin_change": ("scaler",)}
    with (opened := open_run_folder(tiny(run, steps=9, extend=True, **asked))).lock:
        opened.folder.begin(5)
        opened.folder.end(ExitCode.RANK_LOST, "before it saved")
    granted = [with_granted(tiny(run), run, step).request for step in (5, 6)]
    assert [(each.allow_change, each.allow_plugin_change) for each in granted] == [
        (("train.lr",), ("scaler",)),
        ((), ()),
    ]


@pytest.mark.parametrize(
    "attempts", [5, [5], [{"step": "5", "allow_change": ["data"]}], [{"step": 5, "allow_change": 5}]]
)
def test_what_no_run_writes_grants_nothing(tmp_path: Path, attempts: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"attempts": attempts}))
    assert with_granted(tiny(tmp_path), tmp_path, 5).request.allow_change == ()


def test_another_optimizer_that_was_allowed_to_begin_anew_is_the_run_s(run: Path) -> None:
    def opened(**asked: Any) -> OpenedFolder:
        changed = load_config("preset:tiny", sets={"train.steps": 5, "run.folder": run, "optimizer.eps": 0.5})
        return open_run_folder(replace(changed, request=replace(changed.request, resume="3", **asked)))

    with (first := opened(allow_plugin_change=("optimizer",))).lock:
        first.folder.begin(3)
    with opened().lock:
        pass


def test_a_folder_that_cannot_be_made_leaves_none_on_the_way(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too long"):
        open_run_folder(tiny(tmp_path / "new" / ("long" * 100)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_folder_that_cannot_be_locked_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, named: bool
) -> None:
    def refuse(*_: object) -> None:
        raise failure

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(InputError if isinstance(failure, OSError) else KeyboardInterrupt):
        open_run_folder(tiny(tmp_path / "a" / "b" if named else None))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_start_has_locked_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    with FolderLock(path):
        monkeypatch.setattr("megatron_run_engine.run_folder.opening._outermost_missing", lambda _: path)
        with pytest.raises(InputError, match="is in use"):
            open_run_folder(tiny(path))
        assert (path / ".lock").exists()


def test_where_a_log_cannot_be_removed_any_start_takes_the_folder_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_all = SafeFolder.remove_all

    def busy(folder: SafeFolder, name: str) -> None:
        if name == "logs":  # of a rank that still writes into it, on NFS
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        remove_all(folder, name)

    with (opened := open_run_folder(tiny(tmp_path / "run"))).lock, monkeypatch.context() as patched:
        patched.setattr(SafeFolder, "remove_all", busy)
        assert opened.end(ExitCode.DATA, "the data is missing")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["logs", "run.json"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["attempts"] == []
    with (again := open_run_folder(tiny(tmp_path / "run", steps=7))).lock:
        assert again.folder.attempt == 1
        assert json.loads((tmp_path / "run" / "run.json").read_text())["identity"]["train.steps"] == 7
