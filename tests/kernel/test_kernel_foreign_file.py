"""Files that others may have made: nothing keeps their reader waiting, and nothing is read without an end."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_run.files.foreign_file import check_file, followed, open_file, read_file

MAKES: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "missing": lambda path: path.symlink_to("nothing"),
}


@pytest.mark.parametrize("opens", [open_file, read_file, check_file])
@pytest.mark.parametrize(("name", "number"), list(zip(MAKES, ("EINVAL", "EISDIR", "EINVAL", "ENOENT"), strict=True)))
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, opens: Callable[[Path], object], name: str, number: str
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    MAKES[name](tmp_path / name)
    with pytest.raises(OSError, match=name) as caught:
        opens(tmp_path / name)
    assert errno.errorcode[caught.value.errno or 0] == number
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_hole_is_refused_by_its_length(tmp_path: Path) -> None:
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 40 << 30)
    for reads in (read_file, lambda path: check_file(path, 1 << 20)):
        with pytest.raises(OSError, match="it has 42949672960 bytes, and at most") as caught:
            reads(tmp_path / "hole")
        assert caught.value.errno == errno.EFBIG


def test_a_file_of_the_limit_is_read_whole_over_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link", 4) == b"1234"
    with pytest.raises(OSError, match="at most 3 are read"):
        read_file(tmp_path / "link", 3)


def test_links_lead_within_their_folder_and_to_the_blobs_of_its_cache(tmp_path: Path) -> None:
    home = tmp_path / "snapshots" / "1"
    (home / "inner").mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for target in ("inner/a", "../../blobs/a"):
        (home / "link").unlink(missing_ok=True)
        (home / "link").symlink_to(target)
        assert followed(home, "link") == (home / target).resolve()
    for target in ("../a", "../../blobs2/a", "/etc/passwd"):
        (home / "link").unlink()
        (home / "link").symlink_to(target)
        with pytest.raises(OSError, match="outside of its folder"):
            followed(home, "link")
    (home / "inner").rmdir()
    (home / "inner").symlink_to("/etc")
    with pytest.raises(OSError, match="outside of its folder"):
        followed(home, "inner/passwd")
