"""Run folders that were prepared: by somebody else, who wants a run to write elsewhere, or by a job that was killed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_run.errors import InputError
from megatron_run.files.safe_folder import SafeFolder
from megatron_run.planning import ResolvedRun, load_config
from megatron_run_engine.builtin.observer.jsonl import LineFile
from megatron_run_engine.launch.rank_output import redirect_output
from megatron_run_engine.run_folder import History, RunFolder, open_run_folder
from megatron_run_engine.run_folder.folder import DESCRIPTION, last_config
from megatron_run_observer_tensorboard.events import EventFile
from megatron_run_observer_trace import trace_path, write_new
from tests.support.start_windows import changes_of, goes_on_after, killed_before


def tiny(path: Path, **sets: Any) -> ResolvedRun:
    return load_config("preset:tiny", sets={"run.folder": path, **sets})


@pytest.fixture(autouse=True)
def _quick_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """What describes the machine takes long to find out, and says nothing here."""
    for name in ("environment_record", "git_record"):
        monkeypatch.setattr(f"megatron_run_engine.run_folder.records.{name}", dict)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder after its first attempt."""
    open_run_folder(tiny(tmp_path / "run")).lock.release()
    return tmp_path / "run"


def early_version(run: Path) -> None:
    """Leave what describes the first attempt in the run folder alone, as early versions wrote it."""
    for name in DESCRIPTION:
        (run / "logs" / "attempt-001" / name).unlink()


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of the user's, whose last line is not ended."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "notes").write_bytes(b"mine\nhalf a line")
    return folder


def untouched(home: Path) -> bool:
    return {path.name: path.read_bytes() for path in home.iterdir()} == {"notes": b"mine\nhalf a line"}


@pytest.mark.parametrize("name", ["logs/attempt-002/config.yaml", "logs/attempt-002/plan.json", "status.json"])
def test_records_are_not_written_over_a_link(run: Path, precious: Path, name: str) -> None:
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(precious / "notes")
    with pytest.raises(InputError, match=r"it is a symbolic link: .*" + Path(name).name):
        open_run_folder(tiny(run))
    assert untouched(precious)


@pytest.mark.parametrize("name", ["logs", "logs/attempt-002"])
@pytest.mark.parametrize("target", ["home", "home/absent"])
def test_a_folder_of_logs_is_not_made_over_a_link(run: Path, precious: Path, name: str, target: str) -> None:
    if name == "logs":
        (run / "logs").rename(run / "moved")
    (run / name).symlink_to(precious.parent / target)
    with pytest.raises(InputError, match=r"it is a symbolic link: "):
        open_run_folder(tiny(run))
    assert untouched(precious)


def test_a_log_that_is_a_link_is_not_written(run: Path, precious: Path) -> None:
    folder = RunFolder(run, 1)
    folder.log(0).symlink_to(precious / "notes")
    with pytest.raises(OSError, match="it is a symbolic link"):
        redirect_output(folder.log(0))
    assert untouched(precious)


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl"])
def test_numbers_are_not_written_over_a_link_whose_target_keeps_its_last_line(
    run: Path, precious: Path, name: str
) -> None:
    (run / name).symlink_to(precious / "notes")
    with pytest.raises(OSError, match="it is a symbolic link"):
        LineFile(run / name)
    with pytest.raises(InputError, match="it is a symbolic link"):
        History(run).metrics if name == "metrics.jsonl" else History(run).evaluations
    assert untouched(precious)


@pytest.mark.parametrize("name", ["tensorboard", "trace"])
def test_folders_of_observers_are_not_made_over_a_link(run: Path, precious: Path, name: str) -> None:
    (run / name).symlink_to(precious)
    summary: Any = SimpleNamespace(folder=run, attempt=1)
    make: dict[str, Callable[[], object]] = {
        "trace": lambda: write_new(trace_path(summary, 3), "{}"),
        "tensorboard": lambda: EventFile(run / name, 1),
    }
    with pytest.raises(OSError, match="it is a symbolic link"):
        make[name]()
    assert untouched(precious)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../../home/x"},
        {"id": "a" * 31},
        {"id": None},
        {"attempts": 3},
        {"attempts": [1]},
        {"attempts": [{"changes": 5}]},
        {"attempts": [{"allow_change": "data"}]},
        {"attempts": [{"allow_change": [["data"]]}]},
        {"attempts": [{"step": "3"}]},
        {"identity": [1]},
    ],
    ids=str,
)
def test_a_record_that_no_run_writes_is_refused_in_one_line(run: Path, change: dict[str, Any]) -> None:
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | change))
    with pytest.raises(InputError, match=r"run\.json is not what a run writes"):
        open_run_folder(tiny(run))
    assert RunFolder(run, 1).run_id == ("unnamed" if "id" in change else record["id"])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["run.json", "status.json"])
def test_a_pipe_in_the_place_of_a_record_is_not_waited_for(run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    if name == "run.json":
        with pytest.raises(InputError, match=r"run\.json cannot be read"):
            open_run_folder(tiny(run))
    else:
        open_run_folder(tiny(run)).lock.release()  # the status is replaced, whatever it was


#: Attempts before, and of how many changes in a row one is tried: by day every other, since neighbours differ least.
@pytest.mark.parametrize(
    ("attempts", "stride"), [*(pytest.param(each, 1, marks=pytest.mark.nightly) for each in (0, 1)), (1, 2)]
)
def test_whenever_the_launcher_is_killed_at_its_start_the_same_command_goes_on(
    tmp_path: Path, attempts: int, stride: int
) -> None:
    run, folder = tiny(tmp_path / "run"), tmp_path / "run"
    count = changes_of(run, folder, attempts)
    assert count > 15, "a start writes that many files"
    for at in range(0, count, stride):
        assert goes_on_after(at, run, folder, attempts), f"before change {at}"


def test_a_start_that_was_killed_before_anything_was_trained_binds_nobody(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run")
    count = 0
    while not (tmp_path / "run" / "run.json").exists():
        assert not killed_before(count, run)
        count += 1
    opened = open_run_folder(tiny(tmp_path / "run", **{"train.lr": 0.5}))
    opened.lock.release()
    assert opened.folder.attempt == 1


@pytest.mark.parametrize("name", [*DESCRIPTION, "run.json", "logs/attempt-001"])
def test_an_attempt_that_cannot_begin_is_refused_and_the_run_is_what_it_was(
    run: Path, tmp_path: Path, name: str
) -> None:
    early_version(run)
    shutil.rmtree(run / "logs")
    opened = open_run_folder(tiny(run, **{"train.lr": 0.5}))
    before = {each: (run / each).read_bytes() for each in (*DESCRIPTION, "run.json")}
    (run / name).rename(tmp_path / "elsewhere") if (run / name).exists() else None
    (run / name).symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(InputError, match=f"cannot be used: it is a symbolic link: .*{name}") as caught,
        opened.folder.in_use(),
    ):
        opened.folder.begin(0)
    assert opened.end(caught.value.exit_code, str(caught.value)), "it is taken back"
    opened.lock.release()
    assert {each: (run / each).read_bytes() for each in before if each != name} == {
        each: content for each, content in before.items() if each != name
    }


def test_a_record_that_cannot_be_read_is_not_written_anew(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_run_folder(tiny(run))
    before, read = (run / "run.json").read_bytes(), SafeFolder.read

    def fails(files: SafeFolder, name: str, *more: int) -> bytes:
        if name == "run.json":
            raise OSError(errno.EIO, "Input/output error", str(files.path / name))
        return read(files, name, *more)

    with monkeypatch.context() as patched:
        patched.setattr(SafeFolder, "read", fails)
        with pytest.raises(InputError, match="Input/output error"), opened.folder.in_use():
            opened.folder.begin(0)
    opened.lock.release()
    assert (run / "run.json").read_bytes() == before


def test_an_error_of_another_folder_is_not_the_run_folders(run: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), RunFolder(run, 1).in_use():
        (tmp_path / "absent").read_bytes()


@pytest.mark.parametrize("link", ["logs", "logs/attempt-002", "logs/attempt-002/config.yaml"])
def test_the_last_configuration_is_not_looked_for_behind_a_link(run: Path, tmp_path: Path, link: str) -> None:
    early_version(run)
    open_run_folder(tiny(run)).lock.release()
    found = last_config(run)
    assert found is not None
    assert found.path == run / "logs" / "attempt-002" / "config.yaml"
    (run / link).rename(tmp_path / "elsewhere")
    (run / link).symlink_to(tmp_path / "elsewhere")
    found = last_config(run)
    assert found is not None
    assert found == (run / "config.yaml", (run / "config.yaml").read_text())
