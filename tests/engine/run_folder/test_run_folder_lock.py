"""The lock of a run folder, however its holder ends and whatever the file system can."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_run.errors import InputError
from megatron_run_engine.run_folder import FolderLock


def test_the_lock_of_a_killed_job_is_free(tmp_path: Path) -> None:
    code = "import os,sys,pathlib; from megatron_run_engine.run_folder import FolderLock\n"
    code += "FolderLock(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    FolderLock(tmp_path).release()


def test_a_lock_is_tried_again_while_somebody_looks_whether_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: reader.close())
        FolderLock(tmp_path).release()


@pytest.mark.parametrize("call", ["ftruncate", "write"])
def test_a_lock_that_does_not_get_its_holders_name_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(OSError, match="quota"):
            FolderLock(tmp_path)
    FolderLock(tmp_path).release()


def test_a_lock_whose_close_fails_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, held = os.close, FolderLock(tmp_path)

    def close(handle: int) -> None:
        real(handle)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", close)
        held.release()
    held.release()
    FolderLock(tmp_path).release()


def test_without_flock_a_file_stands_for_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    expected = r"if that process is gone, delete .*\.lock-exclusive"
    with FolderLock(tmp_path), pytest.raises(InputError, match=expected):
        FolderLock(tmp_path)
    FolderLock(tmp_path).release()
