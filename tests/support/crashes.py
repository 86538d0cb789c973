"""Saving on a disk that stops: every change is recorded, then the disk is rebuilt as it would be after each of them.

Two kinds of end. A process that is killed leaves everything that it had asked for, the last write perhaps in part. A
machine that loses power keeps what was synced; of the rest each folder may have kept all changes of names, none, or
the newest alone, and files may lack whatever content was not synced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from megatron_run_engine.checkpoint.files import FileSystem, NewFile

Kept = Literal["none", "all", "newest"]
_KEPT: tuple[Kept, ...] = get_args(Kept)
#: A folder as it was found: names -> content, or a folder.
Tree = Mapping[str, "bytes | Tree"]


class Change(NamedTuple):
    """One call: the path it is about, relative to the run folder, and its data or second path."""

    call: str
    path: Path
    data: bytes = b""
    target: Path = Path()

    def __str__(self) -> str:
        return f"{self.call} {self.path}"


class RecordedFile(NewFile):
    """A real file whose writes and syncs are noted."""

    def __init__(self, path: Path, files: RecordingFileSystem) -> None:
        super().__init__(path)
        self._files = files

    def write(self, data: bytes | memoryview) -> None:
        """Note and do."""
        self._files.note("write", self.path, data=bytes(data))
        super().write(data)

    def sync(self) -> None:
        """Note only: the disk of a test need not last."""
        self._files.note("sync", self.path)


class RecordingFileSystem(FileSystem):
    """Does every change under ``root`` and notes it in ``changes``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.changes: list[Change] = []

    def note(self, call: str, path: Path, target: Path | None = None, data: bytes = b"") -> None:
        """One more change."""
        second = target.relative_to(self._root) if target else Path()
        self.changes.append(Change(call, path.relative_to(self._root), data, second))

    def create(self, path: Path) -> NewFile:
        """Note and do."""
        self.note("create", path)
        return RecordedFile(path, self)

    def make_folder(self, path: Path) -> None:
        """Note and do."""
        self.note("make_folder", path)
        super().make_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        """Note and do."""
        self.note("rename", source, target)
        super().rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        """Note and do."""
        self.note("rename", source, target)
        super().replace(source, target)

    def unlink(self, path: Path, folder: int | None = None) -> None:
        """Note and do; what is not there is not noted."""
        super().unlink(path, folder)
        self.note("remove", path)

    def remove_folder(self, path: Path, folder: int | None = None) -> None:
        """Note and do."""
        self.note("remove", path)
        super().remove_folder(path, folder)

    def sync_folder(self, path: Path) -> None:
        """Note only."""
        self.note("sync_folder", path)


@dataclass
class _File:
    now: bytes = b""
    safe: bytes = b""


@dataclass
class _Folder:
    """Names now, names that are safe, and the changes since then, in order."""

    now: dict[str, _File | _Folder] = field(default_factory=dict)
    safe: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[dict[str, _File | _Folder | None]] = field(default_factory=list)

    def change(self, names: dict[str, _File | _Folder | None]) -> None:
        self.pending.append(names)
        _put(self.now, names)

    def sync(self) -> None:
        self.safe, self.pending = dict(self.now), []

    def kept(self, kept: Kept) -> dict[str, _File | _Folder]:
        names = dict(self.safe)
        for change in {"none": [], "newest": self.pending[-1:], "all": self.pending}[kept]:
            _put(names, change)
        return names


def _put(names: dict[str, _File | _Folder], changes: Mapping[str, _File | _Folder | None]) -> None:
    for name, node in changes.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Disk:
    """A disk on which changes are made one by one."""

    def __init__(self) -> None:
        self._root = _Folder()

    def apply(self, change: Change) -> None:
        """Make one change."""
        folder, name = self._folder(change.path.parent), change.path.name
        if change.call in ("make_folder", "create"):
            folder.change({name: _Folder() if change.call == "make_folder" else _File()})
        elif change.call == "write":
            self._file(change.path).now += change.data
        elif change.call == "sync":
            self._file(change.path).safe = self._file(change.path).now
        elif change.call == "rename":
            assert change.target.parent == change.path.parent
            folder.change({name: None, change.target.name: folder.now[name]})
        elif change.call == "remove":
            folder.change({name: None})
        else:
            self._folder(change.path).sync()

    def after_kill(self) -> Tree:
        """What is there when the process is gone and the machine goes on."""
        return _tree(self._root, lambda folder: folder.now, lambda file: file.now)

    def after_power_loss(self) -> Iterator[tuple[str, Tree]]:
        """What may be there after a loss of power: what the upper folders kept x what the step folders kept."""
        upper = {id(self._root), *map(id, self._root.now.values())}
        for outer, inner in product(_KEPT, _KEPT[:2]):
            chosen = partial(_kept_names, upper, outer, inner)
            yield f"names kept: {outer} above, {inner} in steps", _tree(self._root, chosen, lambda file: file.safe)

    def _folder(self, path: Path) -> _Folder:
        node: _File | _Folder = self._root
        for part in path.parts:
            assert isinstance(node, _Folder)
            node = node.now[part]
        assert isinstance(node, _Folder)
        return node

    def _file(self, path: Path) -> _File:
        node = self._folder(path.parent).now[path.name]
        assert isinstance(node, _File)
        return node


def _kept_names(upper: set[int], outer: Kept, inner: Kept, folder: _Folder) -> dict[str, _File | _Folder]:
    return folder.kept(outer if id(folder) in upper else inner)


def _tree(
    folder: _Folder, names: Callable[[_Folder], dict[str, _File | _Folder]], content: Callable[[_File], bytes]
) -> Tree:
    return {
        name: content(node) if isinstance(node, _File) else _tree(node, names, content)
        for name, node in names(folder).items()
    }


def ends(changes: Sequence[Change], dropped: int | None = None) -> Iterator[tuple[int, str, Tree]]:
    """How the disk may look when it stops after each number of changes; equal states come once in a row.

    A write may have come half-way. The sync of index ``dropped`` does nothing.
    """
    disk, seen = Disk(), ""
    for done, change in enumerate([*changes, None]):
        states = [("killed", disk.after_kill()), *disk.after_power_loss()]
        if change is not None and done != dropped:
            half, rest = change.data[: len(change.data) // 2], change.data[len(change.data) // 2 :]
            if change.call == "write":
                disk.apply(change._replace(data=half))
                states.append(("killed in a write", disk.after_kill()))
                disk.apply(change._replace(data=rest))
            else:
                disk.apply(change)
        for label, tree in states:
            key = repr(tree)
            if key != seen:
                yield done, label, tree
            seen = key


def materialise(tree: Tree, path: Path) -> None:
    """Write ``tree`` into the new folder ``path``."""
    path.mkdir()
    for name, node in tree.items():
        if isinstance(node, bytes):
            (path / name).write_bytes(node)
        else:
            materialise(node, path / name)
