"""The status page of a rank: what it is doing, in a small file mapped into its memory.

A rank that hangs or is stopped cannot answer questions, but its page still says where it is. Writing one takes neither
a system call nor a thread, so that it is up to date even when the rank then holds the interpreter lock for ever. There
is no lock: a page that is read while it is written may be torn, and is believed only once it stays the same a while.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megatron_run.contracts.activity import Activity, Collective, Exchange, PhaseName
from megatron_run.files.publishing import publishing
from megatron_run.files.safe_folder import parse_json

#: Changes, process id, step, steps done, ahead, peer, the slot of the collective that it is in, that collective's
#: number, phase, detail: see :class:`Page`. A peer or a slot of -1 is none.
_HEAD = struct.Struct("<QqqQ?qqQ24s136s")
#: One scope: its name, how many collectives were entered, the last one's values and operation.
_SLOT = struct.Struct("<16sQQ24s")
_SLOTS, _FIRST_SLOT = 16, 256
#: The ranks of each scope, as JSON behind its length.
_LENGTH, _MEMBERS = struct.Struct("<Q"), _FIRST_SLOT + _SLOTS * _SLOT.size
_SIZE = 1 << 13


class Entered(NamedTuple):
    """The last collective that a rank has entered over some scope: its number, how many values, and the operation."""

    number: int
    values: int
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} of {self.values} values" if self.values else self.operation


@dataclass(frozen=True)
class Page:
    """The content of a status page.

    ``changes`` counts how often it was written, ``done`` the steps that the rank has completed since it started.
    ``phase`` and ``detail`` are what the rank does; ``peer`` is the rank at the other end of its message, ``inside``
    the scope and the number of the collective in which it is. ``entered`` is by scope, and so are the ranks that take
    part, ``members``. ``ahead``: the rank launches its collectives and does not wait in them: a GPU executes them.
    """

    changes: int
    process: int
    step: int
    phase: str
    detail: str = ""
    done: int = 0
    ahead: bool = False
    peer: int | None = None
    inside: tuple[str, int] | None = None
    entered: Mapping[str, Entered] = field(default_factory=dict)
    members: Mapping[str, range] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """``backward B1.0 of step 3``."""
        what = f"{self.phase} {self.detail}".strip()
        return f"{what} of step {self.step}" if self.step else what

    @staticmethod
    def changes_at(path: Path) -> int:
        """How many changes the page at ``path`` has seen; 0 while there is none."""
        try:
            with path.open("rb", buffering=0) as file:
                return int.from_bytes(file.read(8), sys.byteorder)
        except OSError:
            return 0

    @classmethod
    def read(cls, path: Path) -> Page | None:
        """The page at ``path``; None while there is none, or nothing was written to it."""
        try:
            content = path.read_bytes()
        except OSError:
            return None
        return cls.parse(content) if len(content) == _SIZE else None

    @classmethod
    def parse(cls, content: bytes) -> Page | None:
        """The page whose bytes these are, with or without the zeros at its end; None when nothing was written to it."""
        content = content.ljust(_SIZE, b"\0")
        changes, process, step, done, ahead, peer, slot, number, phase, detail = _HEAD.unpack_from(content)
        if not changes:
            return None
        entered = {}
        for index in range(_SLOTS):
            scope, count, values, operation = _SLOT.unpack_from(content, _FIRST_SLOT + index * _SLOT.size)
            if count:
                entered[_text(scope)] = Entered(count, values, _text(operation))
        inside = (list(entered)[slot], number) if 0 <= slot < len(entered) else None
        return cls(
            changes=changes,
            process=process,
            step=step,
            done=done,
            ahead=ahead,
            phase=_text(phase),
            detail=_text(detail),
            peer=None if peer < 0 else peer,
            inside=inside,
            entered=entered,
            members=_members(content),
        )


class PageWriter:
    """Writes the page at ``path`` at each change of ``activity``, as its recorder."""

    def __init__(self, path: Path, activity: Activity, *, ahead: bool = False) -> None:
        self._activity, self._process, self._ahead, self._changes = activity, os.getpid(), ahead, 0
        self._step = self._done = 0
        self._slots: dict[str, tuple[int, int]] = {}  # scope -> its slot, and the last number in it
        self._phase = self._text = b""
        self._detail: object = None
        with publishing(path, durable=False) as (file,):
            file.write(bytes(_SIZE))  # not a hole: a full disk must raise here, not kill the process by SIGBUS later
            file.flush()
            self._page = mmap.mmap(file.fileno(), _SIZE)
        activity.recorder = self
        activity.enter(*activity.now)

    def __call__(self, step: int, name: PhaseName, detail: object) -> None:
        """Write a change. A collective leaves the phase in which it was begun."""
        self._changes += 1
        if step != self._step:
            self._done += self._step > 0
            self._step = step
        peer, slot, number = -1, -1, 0
        if isinstance(detail, Collective):
            slot, number = self._enter(detail), detail.number
        else:
            if isinstance(detail, Exchange):
                peer, detail = detail.rank, detail.message
            self._phase = name.encode()
            if detail is not self._detail:  # after a collective the same phase resumes: its text is known
                self._detail, self._text = detail, str(detail).encode()
        _HEAD.pack_into(
            self._page, 0,
            self._changes, self._process, step, self._done, self._ahead, peer, slot, number, self._phase, self._text,
        )  # fmt: skip

    def close(self) -> None:
        """Write no more; what was written stays in the file."""
        self._activity.recorder = None
        self._page.close()

    def _enter(self, collective: Collective) -> int:
        """Write a collective to its scope's slot, unless a later one has begun; the slot, -1 when none is left."""
        operation, scope, number, values = collective
        slot, last = self._slots.get(scope, (len(self._slots), 0))
        if slot == _SLOTS:
            return -1
        if number > last:
            self._slots[scope] = slot, number
            offset = _FIRST_SLOT + slot * _SLOT.size
            _SLOT.pack_into(self._page, offset, scope.encode(), number, values, operation.encode())
        if not last:
            self._write_members()
        return slot

    def _write_members(self) -> None:
        known = {scope: ranks for scope, ranks in self._activity.members.items() if scope in self._slots}
        content = json.dumps({scope: _packed(ranks) for scope, ranks in known.items()}).encode()
        if _MEMBERS + _LENGTH.size + len(content) <= _SIZE:
            start = _MEMBERS + _LENGTH.size
            self._page[start : start + len(content)] = content
            _LENGTH.pack_into(self._page, _MEMBERS, len(content))


def _packed(ranks: tuple[int, ...]) -> list[int]:
    """First, end and stride of ranks that are evenly spaced, as those of an axis are; of others nothing."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    span = range(ranks[0], ranks[-1] + 1, stride)
    return [span.start, span.stop, span.step] if tuple(span) == ranks else []


def _members(content: bytes) -> dict[str, range]:
    (length,) = _LENGTH.unpack_from(content, _MEMBERS)
    start = _MEMBERS + _LENGTH.size
    try:
        packed = parse_json(content[start : start + length] or b"{}")
        return {scope: range(*span) for scope, span in packed.items() if span}
    except (ValueError, TypeError, AttributeError):  # torn
        return {}


def _text(field_: bytes) -> str:
    return field_.rstrip(b"\0").decode(errors="replace")
