"""What is no file, or has no end, in the place of each reader's file: an answer all the same, at once and small.

A reader that waits for the other end of a FIFO, follows a link into a device or reads a hole whole is found here. What
is placed is named by the input, so that readers that come later are tried with all of it.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from megatron_run_engine.data.user_files import PROBE
from tests.campaigns.figures import Figures
from tests.campaigns.fuzz import Fuzzed, TooLong, read_all
from tests.campaigns.fuzzed import READERS, WIRE, FuzzedReader

#: Bytes of a hole: more than any machine's memory gives a reader here.
HOLE = 40 << 30
#: Seconds after which a reader waits for somebody: no machine is as slow.
WAITED = 30.0


def _hole(path: Path, whole: bytes) -> None:
    path.touch()
    os.truncate(path, HOLE)


def _begun(path: Path, whole: bytes) -> None:
    path.write_bytes(whole)
    os.truncate(path, HOLE)


def _begun_long(path: Path, whole: bytes) -> None:
    """With more in front than is looked at to see what a file is."""
    path.write_bytes(whole * (2 * PROBE // len(whole) + 1))
    os.truncate(path, HOLE)


#: What takes the place of a file, which had these contents.
SPECIAL: Mapping[str, Callable[[Path, bytes], None]] = {
    "a FIFO": lambda path, whole: os.mkfifo(path),
    "a folder": lambda path, whole: path.mkdir(),
    "a hole": _hole,
    "the file with a hole behind": _begun,
    "the file many times with a hole behind": _begun_long,
    "a link to a device": lambda path, whole: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path, whole: path.symlink_to("nothing"),
}
#: Readers whose file is read by the campaign, which hands them its bytes, and one whose OSError a run names.
_OTHERS = (
    *("YAML", "metrics.jsonl that goes on"),
    *(name for name, each in READERS.items() if each.group == WIRE or each.file.startswith("words/")),
)


def _waits(number: int, frame: FrameType | None) -> None:
    raise TooLong


class Placed(Fuzzed):
    """A reader whose file is replaced by what inputs name."""

    def attempt(self, content: bytes) -> str:
        """Read what ``content`` names; what was wrong with the answer. A reader that waits is ended, as a fault."""
        signal.signal(signal.SIGALRM, _waits)
        signal.setitimer(signal.ITIMER_REAL, WAITED)
        try:
            return super().attempt(content)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            self._remove()
            self.path.write_bytes(self._whole)

    def _place(self, content: bytes) -> None:
        self._remove()
        SPECIAL[content.decode()](self.path, self._whole)

    def _smallest(self, content: bytes, fault: str) -> bytes:
        return content

    def _remove(self) -> None:
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)
        self.path.unlink(missing_ok=True)


def placed(reader: FuzzedReader, corpus: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """The names of ``count`` special files, from the one of ``seed`` on."""
    names = [name.encode() for name in SPECIAL]
    yield from (names[(seed + place) % len(names)] for place in range(min(count, len(names))))


def all_readers() -> list[str]:
    """The names of those that open their file themselves."""
    return [name for name in READERS if name not in _OTHERS]


def special(folder: Path, share: float, seed: int, jobs: int, only: Sequence[str] = ()) -> list[Figures]:
    """Each special file in the place of each reader's: a row for each group of readers."""
    tasks = [(name, max(1, round(len(SPECIAL) * share))) for name in only or all_readers()]
    return read_all("no usual file", tasks, placed, folder, seed, jobs, Placed)
