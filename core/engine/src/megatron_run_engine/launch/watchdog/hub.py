"""Where the watchers of all ranks meet, on however many hosts: one of them hears all, judges, and tells all.

It lives in the watcher of rank 0, and not in rank 0, which may be the one that hangs.
"""

from __future__ import annotations

import base64
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hmac import compare_digest
from typing import Any

from megatron_run.errors import ExitCode, RankLostError
from megatron_run_engine.launch.watchdog.lines import Lines
from megatron_run_engine.launch.watchdog.page import Page
from megatron_run_engine.launch.watchdog.verdict import Seen, Waits, judge
from megatron_run_engine.launch.watchdog.watcher import INTERVAL, LONGEST

#: Seconds that ranks get to end by themselves once one of them is lost: all are gone within 5.
GRACE = 3.5
#: Ends that do not trouble the other ranks.
_IN_ORDER = (ExitCode.DONE, ExitCode.TIME_LIMIT, ExitCode.SIGINT, ExitCode.SIGTERM)


class Hub:
    """Hears ``size`` watchers that know ``token``; a rank hangs after ``timeout`` seconds.

    ``address`` is where it listens: on this host alone, or everywhere when empty.
    """

    def __init__(self, size: int, timeout: float, token: str, address: str) -> None:
        self._timeout, self._token, self._looked = timeout, token, time.monotonic()
        self._server = socket.create_server((address, 0), backlog=size)
        self._seen, self._waits = [Seen(None) for _ in range(size)], Waits(timeout, size)
        self._lines: dict[Lines, int | None] = {}
        self._verdict: dict[str, Any] = {}
        self._provisional, self._ending = False, 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._server.getsockname()[1]
        return port

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def finish(self, within: float) -> None:
        """Say what is left to say, and end."""
        self._closing = True
        self._thread.join(within)

    def _run(self) -> None:
        while not self._closing or self._pending():  # what has arrived is read to its end
            heard: Sequence[socket.socket | Lines] = [self._server, *self._lines]
            for each in select.select(heard, [], [], INTERVAL)[0]:
                if isinstance(each, Lines):
                    self._hear(each)
                else:
                    self._lines[Lines(each.accept()[0])] = None
            self._look()
        for lines in self._lines:
            lines.say(bye=True)
            lines.close()
        self._server.close()

    def _look(self) -> None:
        """Judge, as often as it is worth it; while somebody is silent."""
        passed = time.monotonic() - self._looked
        if passed < INTERVAL or self._verdict:
            return
        self._looked += passed
        if all(max(seen.quiet, seen.stopped) < self._timeout / 2 for seen in self._seen):
            return
        error = judge(self._waits.after(min(passed, LONGEST), self._seen), self._timeout)
        if error is not None:
            self._end_all(error, 0.0)

    def _pending(self) -> bool:
        """Whether something has arrived that was not read yet."""
        return bool(select.select(list(self._lines), [], [], 0.0)[0])

    def _hear(self, lines: Lines) -> None:
        for message in lines.hear():
            rank = self._lines[lines]
            if rank is None:
                self._greet(lines, message)
            else:
                self._note(rank, message)
        if not lines.open:
            rank = self._lines.pop(lines)
            lines.close()
            if rank is not None and not self._seen[rank].ended:
                self._lost(rank, "its watcher is gone, and so may be its host")

    def _greet(self, lines: Lines, message: Mapping[str, Any]) -> None:
        rank = message.get("rank")
        known = compare_digest(str(message.get("token")).encode(errors="replace"), self._token.encode())
        if known and rank in range(len(self._seen)):
            self._lines[lines] = rank
            if self._verdict:  # it comes too late
                lines.say(**self._verdict, speak=False)
        else:
            lines.close()

    def _note(self, rank: int, message: Mapping[str, Any]) -> None:
        """What a watcher says of its rank: how long it was silent; that it has ended; or that it is dead."""
        if "over" in message:
            self._seen[rank] = replace(self._seen[rank], ended=True)
            if message["over"] not in _IN_ORDER:
                self._provisional = not self._verdict
                self._end_all(RankLostError(f"rank {rank} failed, and the others did not end", rank=rank), GRACE)
                for lines in self._lines:
                    lines.say(hush=True)  # it says itself why, and one line is enough
        elif "gone" in message:
            self._lost(rank, message["gone"])
        elif "quiet" in message:
            page = Page.parse(base64.b64decode(message["page"])) if "page" in message else self._seen[rank].page
            self._seen[rank] = Seen(page, message["quiet"], message["stopped"])

    def _lost(self, rank: int, why: str) -> None:
        self._seen[rank] = replace(self._seen[rank], ended=True)
        left = GRACE
        if self._provisional and self._verdict:  # those that failed before failed because of this one
            self._verdict, self._provisional = {}, False
            left = max(0.0, GRACE - (time.monotonic() - self._ending))
        self._end_all(RankLostError(f"rank {rank} was lost", why=why, rank=rank), left)

    def _end_all(self, error: RankLostError, grace: float) -> None:
        """Tell every watcher to end its rank after ``grace`` seconds; one of the innocent ranks speaks for all."""
        if self._verdict:
            return
        self._verdict, self._ending = {"end": str(error), "rank": error.rank, "grace": grace}, time.monotonic()
        known = {rank: lines for lines, rank in self._lines.items() if rank is not None}
        innocent = [rank for rank in known if rank != error.rank and not self._seen[rank].ended]
        speaker = min(innocent, default=error.rank)
        for rank, lines in known.items():
            lines.say(**self._verdict, speak=rank == speaker)
