"""Files that are published: whole, together, and without what a killed writer has left."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from megatron_run.files import temporary_names
from megatron_run.files.publishing import publishing, publishing_folder
from megatron_run.files.temporary_names import temporary_name
from tests.support.processes import wait_until


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_appear_together_when_all_are_whole(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("old")
    with publishing(tmp_path / "a", tmp_path / "b") as (a, b):
        a.write(b"1")
        b.write(b"2")
        assert not (tmp_path / "a").exists()
        assert (tmp_path / "b").read_text() == "old"
    assert names(tmp_path) == ["a", "b"]
    assert (tmp_path / "a").read_text() + (tmp_path / "b").read_text() == "12"


def test_an_error_leaves_all_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("old")
    with pytest.raises(ZeroDivisionError), publishing(tmp_path / "a", tmp_path / "b") as (a, _):  # noqa: PT012
        a.write(b"1")
        raise ZeroDivisionError
    assert names(tmp_path) == ["b"]
    assert (tmp_path / "b").read_text() == "old"


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_publishes_none_of_several(full: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b").write_text("old")
    calls = []

    def sync(handle: int) -> None:
        calls.append(handle)
        if len(calls) > full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(OSError, match="No space left"), publishing(tmp_path / "a", tmp_path / "b"):
        pass
    assert names(tmp_path) == ["b"]
    assert (tmp_path / "b").read_text() == "old"


@pytest.mark.parametrize("signal_too", [False, True])
def test_a_name_that_is_refused_takes_the_others_back(
    signal_too: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the old last file, which has made way by then."""
    (tmp_path / "last").write_text("old")
    replace = Path.replace

    def refused(self: Path, target: Path) -> Path:
        if target.name == "second":
            raise KeyboardInterrupt if signal_too else OSError("refused")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refused)
    with (
        pytest.raises((OSError, KeyboardInterrupt)),
        publishing(*(tmp_path / name for name in ("a", "second", "last"))),
    ):
        pass
    assert names(tmp_path) == ["last"]
    assert (tmp_path / "last").read_text() == "old"


def test_a_file_keeps_its_mode_and_a_long_name_is_no_hindrance(tmp_path: Path) -> None:
    secret = tmp_path / ("n" * 250)
    secret.touch(mode=0o600)
    with publishing(secret) as (file,):
        file.write(b"new")
    assert (secret.stat().st_mode & 0o777, secret.read_bytes()) == (0o600, b"new")


def test_what_another_host_writes_is_left_alone(tmp_path: Path) -> None:
    """Its lock may not be seen here."""
    other = tmp_path / temporary_name("a").replace(temporary_names._host(), "0" * 8)
    other.touch()
    with publishing(tmp_path / "a"):
        pass
    assert other.exists()


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a device"])
def test_what_is_no_file_is_refused_before_anything_is_written(kind: str, tmp_path: Path) -> None:
    place = Path("/dev/null") if kind == "a device" else tmp_path / "place"
    if kind == "a folder":
        place.mkdir()
    elif kind == "a pipe":
        os.mkfifo(place)
    before = place.stat().st_ino
    with pytest.raises(OSError, match="not a file"), publishing(tmp_path / "other", place):
        pytest.fail("it was opened")
    assert place.stat().st_ino == before
    assert names(tmp_path) in ([], ["place"])


def test_a_link_leads_to_its_file_as_in_a_shell(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")
    for text in (b"new", b"again"):
        with publishing(tmp_path / "link") as (file,):
            file.write(text)
        assert (tmp_path / "folder" / "file").read_bytes() == text
    assert names(tmp_path) == ["folder", "link"]
    assert names(tmp_path / "folder") == ["file"]


def test_what_belongs_together_is_for_nobody_who_may_not_read_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "open").touch(mode=0o644)
    with publishing(tmp_path / "why", tmp_path / "open", tmp_path / "secret"):
        pass
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == dict.fromkeys(
        ("open", "secret", "why"), 0o600
    )


def test_a_pipe_with_the_name_of_a_leftover_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / temporary_name("a"))
    with publishing(tmp_path / "a"):
        pass  # and opening the pipe would wait for ever
    assert "a" in names(tmp_path)


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    made = tmp_path / "a" / "made"
    with publishing_folder(made) as hidden:
        (hidden / "b").mkdir()
        (hidden / "b" / "c").write_text("1")
        assert not made.exists()
    assert names(tmp_path / "a") == ["made"]
    assert (made / "b" / "c").read_text() == "1"
    with pytest.raises(FileExistsError), publishing_folder(made):
        pytest.fail("nothing is overwritten")


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_a_folder_that_does_not_become_whole_goes(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path if call == "rename" else os, call, full)
    with pytest.raises(OSError, match="No space left"), publishing_folder(tmp_path / "a" / "made") as hidden:
        (hidden / "file").write_text("half")
    assert names(tmp_path) == []


def test_the_folder_of_a_killed_writer_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with publishing_folder(tmp_path / "a") as hidden:
            (hidden / "file").write_text("half")
            signal.pause()
    wait_until(lambda: any(tmp_path.glob(".a.*/file")))
    with publishing_folder(tmp_path / "a"):
        assert len(names(tmp_path)) == 2
    (tmp_path / "a").rmdir()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with publishing_folder(tmp_path / "a"):
        pass
    assert names(tmp_path) == ["a"]


def test_the_last_file_is_never_beside_others_than_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data", "index"):
        (tmp_path / name).write_text("old")
    seen = []
    replace = Path.replace

    def watched(self: Path, target: Path) -> Path:
        seen.append((target.name, (tmp_path / "index").exists()))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    with publishing(tmp_path / "data", tmp_path / "index"):
        pass
    assert seen == [("data", False), ("index", False)]


def test_what_a_killed_writer_left_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    pids = []
    for name in ("killed", "killed.notes"):
        pid = os.fork()
        if pid == 0:
            with publishing(tmp_path / name):
                signal.pause()
        pids.append(pid)
    wait_until(lambda: len(names(tmp_path)) == 2)
    os.kill(pids[0], signal.SIGKILL)
    os.waitpid(pids[0], 0)
    (tmp_path / ".killed.mine.tmp").write_text("of the user")
    try:
        left = [name for name in names(tmp_path) if name.startswith(".killed.notes.")]
        with publishing(tmp_path / "killed"):
            pass
        with publishing(tmp_path / "killed.notes"):
            pass
        assert names(tmp_path) == sorted([".killed.mine.tmp", *left, "killed", "killed.notes"])
    finally:
        os.kill(pids[1], signal.SIGKILL)
        os.waitpid(pids[1], 0)
