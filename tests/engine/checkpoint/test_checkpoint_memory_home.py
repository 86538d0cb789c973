"""The home of a run's steps in memory: nobody else's, of no copy of the run, and swept where no run needs it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from megatron_run.contracts.quantities import Span
from megatron_run.contracts.schema import CheckpointSection
from megatron_run.errors import InputError
from megatron_run_engine.checkpoint.memory_home import MemoryHome, forget_steps, newest_in_memory
from tests.support.memory_hosts import RUN


def test_a_folder_that_others_could_change_is_refused(tmp_path: Path) -> None:
    user = tmp_path / f"megatron-run-{os.geteuid()}"
    home = MemoryHome(tmp_path, RUN, tmp_path / "run")
    user.mkdir(mode=0o755)
    with pytest.raises(InputError, match="others may enter it: its mode is 0755"):
        home.make()
    user.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    user.symlink_to("elsewhere")
    with pytest.raises(InputError, match="it is a symbolic link to elsewhere"):
        home.make()
    user.unlink()
    user.write_text("")
    with pytest.raises(InputError, match="it is no folder"):
        home.make()
    user.unlink()
    home.make()
    assert [stat.st_mode & 0o777 for stat in (user.stat(), home.path.stat())] == [0o700] * 2
    owner = os.geteuid()
    with (
        mock.patch("os.geteuid", return_value=owner + 1),
        pytest.raises(InputError, match="it belongs to another user"),
    ):
        MemoryHome(tmp_path, RUN, tmp_path / "run").make()


def test_a_folder_of_somebody_elses_is_neither_emptied_nor_believed(tmp_path: Path) -> None:
    """An attempt without steps in memory removes what others have left: never what a link leads to."""
    saved = tmp_path / "checkpoints"
    (saved / "step5").mkdir(parents=True)
    user, section = tmp_path / f"megatron-run-{os.geteuid()}", CheckpointSection(memory_folder=tmp_path)
    section = section.model_copy(update={"memory_interval": Span.parse(1)})
    user.mkdir(mode=0o700)
    (user / RUN).symlink_to(saved)
    forget_steps(section, RUN, tmp_path, None)
    assert newest_in_memory(section, RUN, tmp_path) is None
    (user / RUN).unlink()
    saved.rename(user / RUN)
    (user / RUN).chmod(0o700)
    user.chmod(0o710)
    forget_steps(section, RUN, tmp_path, None)
    assert newest_in_memory(section, RUN, tmp_path) is None
    user.chmod(0o700)
    assert newest_in_memory(section, RUN, tmp_path) == 5
    forget_steps(section, RUN, tmp_path, 4)
    assert newest_in_memory(section, RUN, tmp_path) is None


def test_a_copy_of_a_run_folder_does_not_get_the_steps_of_the_run_that_was_copied(tmp_path: Path) -> None:
    run, section = tmp_path / "run", CheckpointSection(memory_folder=tmp_path, memory_interval=Span.parse(1))
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"id": RUN}))
    home = MemoryHome(tmp_path, RUN, run)
    home.make()
    (home.path / "step5").mkdir()
    (tmp_path / "link").symlink_to(run)
    token = home.token()
    for name in ("link", "run"):
        MemoryHome(tmp_path, RUN, tmp_path / name).make()
        assert home.token() == token, "another way to the same folder"
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    with pytest.raises(InputError, match=f"is for the steps of the run in {run}: {copy} is a copy of it"):
        MemoryHome(tmp_path, RUN, copy).make()
    forget_steps(section, RUN, copy, None)
    assert newest_in_memory(section, RUN, copy) is None
    assert newest_in_memory(section, RUN, run) == 5
    moved = run.rename(tmp_path / "moved")
    MemoryHome(tmp_path, RUN, moved).make()
    assert newest_in_memory(section, RUN, moved) == 5
    assert json.loads((home.path / "home.json").read_text())["folder"] == str(moved)


def test_homes_of_runs_that_are_finished_or_gone_are_swept_and_no_others(tmp_path: Path) -> None:
    memory, kept = tmp_path / "memory", tmp_path / "runs"
    memory.mkdir()
    states = {"a": "finished", "b": "failed", "c": None, "d": "running"}
    for letter, state in states.items():
        run = kept / letter
        MemoryHome(memory, letter * 32, run).make()
        if state is not None:
            run.mkdir(parents=True)
            (run / "run.json").write_text(f'{{"id": "{letter * 32}"}}')
            (run / "status.json").write_text(f'{{"state": "{state}"}}')
    MemoryHome(memory, "e" * 32, tmp_path / "not mounted" / "run").make()
    MemoryHome(memory, "f" * 32, kept / ("x" * 300) / "run").make()  # which no file system lets anybody look for
    home = MemoryHome(memory, RUN, kept / "mine")
    home.make()
    assert [line.rpartition("/")[2] for line in home.sweep()] == ["a is finished"], "c may be of another container"
    MemoryHome(memory, "a" * 32, kept / "a").make()
    for path in home.path.parent.iterdir():
        os.utime(path, (0, 0))
    lines = home.sweep()
    assert [line.rpartition("/")[2] for line in lines] == ["a is finished", "c is gone"]
    left = {path.name[0] for path in home.path.parent.iterdir()}
    assert left == {"b", "d", "e", "f", RUN[0]}
