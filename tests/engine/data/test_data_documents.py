"""Which files a user's names stand for, and in which order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_run.errors import DataError, ExitCode
from megatron_run_engine.data.documents import find_documents, standard_library


def write(folder: Path, *names: str, content: bytes = b"text") -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def found(folder: Path, *names: str) -> list[str]:
    documents = find_documents([str(folder / name) for name in names])
    return [document.path.relative_to(folder).as_posix() for document in documents]


def test_a_folder_stands_for_its_text_files_sorted_by_their_parts(tmp_path: Path) -> None:
    write(tmp_path, "b.txt", "a/z.py", "a/b/c.md", "a.txt")
    write(tmp_path, ".git/config", "a/.hidden", "__pycache__/x.pyc")
    write(tmp_path, "empty.py", content=b"")
    write(tmp_path, "picture.png", content=b"PNG\0\0")
    assert found(tmp_path, ".") == ["a/b/c.md", "a/z.py", "a.txt", "b.txt"]


def test_the_order_does_not_depend_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "b/1", "a/2", "c/3", "a/1")
    expected = found(tmp_path, ".")
    scan = os.scandir

    class Backwards:
        def __init__(self, folder: object) -> None:
            with scan(folder) as entries:  # type: ignore[call-overload]  # whatever os.walk hands over
                self.entries = iter(sorted(entries, key=lambda entry: entry.name, reverse=True))

        def __enter__(self) -> Backwards:
            return self

        def __exit__(self, *_: object) -> None:
            return

        def __iter__(self) -> Backwards:
            return self

        def __next__(self) -> os.DirEntry[str]:
            return next(self.entries)

        def close(self) -> None:
            return

    monkeypatch.setattr(os, "scandir", Backwards)
    assert found(tmp_path, ".") == expected == ["a/1", "a/2", "b/1", "c/3"]


def test_a_pattern_stands_for_what_it_matches(tmp_path: Path) -> None:
    write(tmp_path, "a/x.py", "a/b/y.py", "a/z.txt")
    assert found(tmp_path, "a/**/*.py") == ["a/b/y.py", "a/x.py"]


def test_names_keep_their_order_and_a_file_counts_once(tmp_path: Path) -> None:
    write(tmp_path, "z.txt", "a/x.py", "a/y.py")
    (tmp_path / "link.py").symlink_to(tmp_path / "a/x.py")
    assert found(tmp_path, "z.txt", "a/y.py", "a", "link.py", "z.txt") == ["z.txt", "a/y.py", "a/x.py"]


def test_links_are_followed_once_and_broken_ones_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "texts/a.txt", "elsewhere/b.txt", "elsewhere/deep/c.txt")
    (tmp_path / "texts/more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/around").symlink_to(tmp_path / "texts")
    (tmp_path / "texts/gone.txt").symlink_to("nowhere.txt")
    assert found(tmp_path, "texts") == ["texts/a.txt", "texts/more/b.txt", "texts/more/deep/c.txt"]
    assert "gone.txt is left out: it is a link to nowhere.txt, which does not exist" in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("corpus.tx", r"corpus.tx does not exist \(from data.paths\); did you mean 'corpus.txt'\?"),
        ("empty.txt", r"data file .*empty.txt is empty"),
        ("hollow", r"folder .*hollow holds no text file .*name files, folders or patterns"),
        ("*.rs", r"\*.rs matches no text file"),
        ("pipe", r"pipe is neither a file nor a folder"),
        ("none/such/place", r"place does not exist"),
        ("weights.bin", r"weights.bin is not text: a NUL"),
        ("broken.txt", r"broken.txt cannot be read: it is a link to nowhere.txt, which does not exist"),
        ("loop.txt", r"loop.txt cannot be read: it is a link to loop.txt: .*[lL]inks"),
    ],
)
def test_a_name_that_stands_for_nothing_is_an_error(tmp_path: Path, name: str, message: str) -> None:
    write(tmp_path, "corpus.txt")
    write(tmp_path, "empty.txt", content=b"")
    (tmp_path / "hollow").mkdir()
    os.mkfifo(tmp_path / "pipe")
    write(tmp_path, "weights.bin", content=b"\0\1")
    for name_, target in (("broken.txt", "nowhere.txt"), ("loop.txt", "loop.txt")):
        (tmp_path / name_).symlink_to(target)
    with pytest.raises(DataError, match=message) as caught:
        found(tmp_path, name)
    assert caught.value.exit_code == ExitCode.DATA
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    (document,) = find_documents([str(tmp_path / "a.txt")])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a.txt cannot be read: No such file or directory"):
        document.read()


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: str) -> None:
        raise PermissionError(13, "Permission denied", folder)  # what the system says to everybody but root

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=rf"{tmp_path} cannot be read: Permission denied"):
        find_documents([str(tmp_path)])


def test_the_standard_library_is_a_few_megabytes_of_sources() -> None:
    documents = standard_library()
    names = {document.path.name for document in documents}
    parts = {part for document in documents for part in document.path.parts}
    assert {"dataclasses.py", "typing.py", "heapq.py"} <= names
    assert parts.isdisjoint({"site-packages", "test", "idlelib", "pydoc_data"})
    assert all(document.path.suffix == ".py" for document in documents)
    assert 4e6 < sum(document.path.stat().st_size for document in documents) < 16e6
