"""A folder that somebody else has prepared: what leads out of it is refused, and nothing but a file is opened."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_run.files.safe_folder import SafeFolder, parse_json
from megatron_run.files.temporary_names import temporary_name

TOUCHING: dict[str, Callable[[SafeFolder, str], object]] = {
    "read": lambda files, name: files.read(name),
    "append": lambda files, name: files.append(name),
    "create": lambda files, name: files.create(name),
    "replace": lambda files, name: files.replace(name, b"new"),
    "make": lambda files, name: files.make(name),
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the prepared one, whose files must stay as they are."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_bytes(b"precious\nhalf")
    return folder


@pytest.fixture
def files(tmp_path: Path) -> SafeFolder:
    (tmp_path / "run").mkdir()
    return SafeFolder(tmp_path / "run")


@pytest.mark.parametrize("how", TOUCHING)
@pytest.mark.parametrize("target", ["file", "absent"])
def test_a_link_is_refused_and_what_it_leads_to_untouched(
    files: SafeFolder, outside: Path, how: str, target: str
) -> None:
    (files.path / "link").symlink_to(outside / target)
    with pytest.raises(OSError, match="link") as caught:
        TOUCHING[how](files, "link")
    assert caught.value.errno in (errno.ELOOP, errno.EEXIST, errno.ENOTDIR)
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"file": b"precious\nhalf"}


@pytest.mark.parametrize("how", TOUCHING)
def test_a_folder_on_the_way_that_is_a_link_is_refused(files: SafeFolder, outside: Path, how: str) -> None:
    (files.path / "a").mkdir()
    (files.path / "a" / "b").symlink_to(outside)
    with pytest.raises(OSError, match="it is a symbolic link") as caught:
        TOUCHING[how](files, "a/b/file")
    assert caught.value.filename == str(files.path / "a" / "b")
    assert (outside / "file").read_bytes() == b"precious\nhalf"


@pytest.mark.parametrize("name", ["../outside/file", "/etc/passwd", "a/../../outside/file", ""])
@pytest.mark.parametrize("how", TOUCHING)
def test_a_name_that_leads_out_is_refused(files: SafeFolder, outside: Path, how: str, name: str) -> None:
    if how == "make" and not name:
        pytest.skip("the folder itself")
    with pytest.raises(OSError, match="it lies outside"):
        TOUCHING[how](files, name)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("how", ["read", "append"])
def test_a_pipe_is_not_waited_for(files: SafeFolder, how: str) -> None:
    os.mkfifo(files.path / "pipe")
    with pytest.raises(OSError, match="it is not a file"):
        TOUCHING[how](files, "pipe")


def test_what_is_too_large_is_not_read(files: SafeFolder) -> None:
    with (files.path / "sparse.json").open("wb") as file:
        file.truncate(40 << 30)
    with pytest.raises(OSError, match="at most") as caught:
        files.read("sparse.json")
    assert caught.value.errno == errno.EFBIG
    assert files.read_json("sparse.json") is None


@pytest.mark.parametrize("content", [b"", b"[" * 200_000, b"\xff", b"[1]"])
def test_json_that_is_no_mapping_is_nothing(files: SafeFolder, content: bytes) -> None:
    files.replace("x.json", content)
    assert files.read_json("x.json") is None
    with pytest.raises(OSError, match="no mapping"):
        files.kept_json("x.json")


def test_what_is_written_anew_forgets_nothing_because_a_read_fails(
    files: SafeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files.kept_json("x.json") == {}
    files.write_json("x.json", {"one": 1})

    def fails(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    assert files.kept_json("x.json") == {"one": 1}
    monkeypatch.setattr(SafeFolder, "read", fails)
    assert files.read_json("x.json") is None
    with pytest.raises(OSError, match="Input/output error"):
        files.kept_json("x.json")


@pytest.mark.parametrize("write", [SafeFolder.replace, lambda files, name, _: files.remove(name)])
def test_what_the_system_refuses_is_told_with_the_whole_path(
    files: SafeFolder, write: Callable[[SafeFolder, str, bytes], object]
) -> None:
    files.make("a/x.json/in it")
    with pytest.raises(OSError, match=r"a/x\.json") as caught:
        write(files, "a/x.json", b"{}")
    assert caught.value.filename == str(files.path / "a" / "x.json")


def test_what_is_written_is_read_again_and_nothing_else_is_left(files: SafeFolder) -> None:
    files.make("a/b")
    files.write_json("a/b/x.json", {"one": 1})
    (files.path / temporary_name("y")).write_bytes(b"of a killed process")
    files.replace("y", b"1\n")
    with files.append("y") as file:
        file.write(b"2\n")
    with files.create("z") as file:
        file.write(b"3\n")
    assert files.read_json("a/b/x.json") == {"one": 1}
    assert (files.read("y"), files.read("z")) == (b"1\n2\n", b"3\n")
    assert sorted(path.name for path in files.path.iterdir()) == ["a", "y", "z"]


def test_descriptors_are_closed_whatever_happens(files: SafeFolder, outside: Path) -> None:
    (files.path / "link").symlink_to(outside)
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    for how in TOUCHING.values():
        for name in ("link/file", "link", "absent/file"):
            with pytest.raises(OSError, match=r"."):
                how(files, name) if how is not TOUCHING["make"] else how(files, f"link/{name}")
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before


def test_a_folder_whose_close_fails_is_not_closed_again_and_nothing_stays_open(
    files: SafeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then its number may be that of another thread's file; and the file that was opened there is its caller's."""
    files.make("a/b")
    before, real = set(Path("/proc/self/fd").iterdir()), os.close
    for failing in range(3):
        closed: list[int] = []

        def close(handle: int, failing: int = failing, closed: list[int] = closed) -> None:
            closed.append(handle)
            real(handle)
            if len(closed) == failing + 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patched:
            patched.setattr(os, "close", close)
            os.fdopen(files.open("a/b/file", os.O_RDWR | os.O_CREAT), "rb").close()
        assert len(closed) > failing
        assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_small_file_takes_little_memory_whatever_the_limit_is(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"{}")
    assert SafeFolder(tmp_path).read("small", limit=1 << 60) == b"{}"


def test_json_that_is_nested_too_deeply_is_no_json() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
