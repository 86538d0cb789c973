"""Where the sidecars of all ranks meet, on however many hosts: the hub judges for all, and tells each what to do.

It lives in the sidecar of rank 0, and not in rank 0, which may be the one that hangs. Messages are JSON, a line each.

A sidecar sends ``rank`` and ``token`` first. Then, every half second, ``quiet`` and ``stopped``, for how long its rank
has been silent or stopped, with the rank's ``page`` when it is silent and the page was not sent yet; and at the end
``over``, the exit code with which its rank ended by itself, or ``gone``, in what it died.

The hub sends ``end``: end your rank after ``grace`` seconds because of ``rank``, for this reason, which your rank
prints when ``speak``; ``hush``: nobody prints it, for the rank that failed has explained itself; and ``bye`` before it
ends, so that no sidecar takes that for the death of rank 0's host.
"""

from __future__ import annotations

import base64
import json
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from hmac import compare_digest
from typing import Any

from megatron_run.errors import ExitCode, RankLostError
from megatron_run_engine.launch.watchdog.monitor import INTERVAL, LONGEST
from megatron_run_engine.launch.watchdog.page import Page
from megatron_run_engine.launch.watchdog.verdict import RankState, UnblockedTimer, judge

#: Seconds that ranks get to end by themselves once one of them is lost: all are gone within 5.
GRACE = 3.5
#: Ends that do not trouble the other ranks.
_IN_ORDER = (ExitCode.DONE, ExitCode.TIME_LIMIT, ExitCode.SIGINT, ExitCode.SIGTERM)
#: Seconds that a write may wait for the other side.
_SEND_TIMEOUT = 1.0
#: No message of ours is longer: a page has 8 KiB.
_LONGEST_LINE = 1 << 16


class Connection:
    """One end of a connection between a sidecar and the hub. ``open`` turns false when the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_TIMEOUT)
        self._socket, self._rest, self.open = connection, b"", True

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; to an end that is gone it is lost."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.open = False

    def receive(self) -> Iterator[Mapping[str, Any]]:
        """The messages that have arrived, once a selector reports the connection as readable."""
        try:
            data = self._socket.recv(_LONGEST_LINE)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.open = self.open and bool(data) and len(self._rest) <= _LONGEST_LINE
        for line in lines:
            with suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    yield message

    def close(self) -> None:
        """Close this end. A selector must have forgotten it before."""
        self.open = False
        self._socket.close()


class Hub:
    """Judges ``size`` ranks by what their sidecars report; a rank hangs after ``timeout`` seconds.

    It listens at ``address``, on every interface when that is empty, and accepts only sidecars that know ``token``.
    """

    def __init__(self, size: int, timeout: float, token: str, address: str) -> None:
        self._timeout, self._token, self._looked = timeout, token, time.monotonic()
        self._server = socket.create_server((address, 0), backlog=size)
        self._selector = selectors.DefaultSelector()  # select() knows no descriptor above 1,023
        self._selector.register(self._server, selectors.EVENT_READ)
        self._states, self._unblocked = [RankState(None) for _ in range(size)], UnblockedTimer(timeout, size)
        self._connections: dict[Connection, int | None] = {}  # the rank, None before it has identified itself
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
        """Read what has arrived, say good-bye, and end."""
        self._closing = True
        self._thread.join(within)

    def _run(self) -> None:
        while True:
            closing = self._closing  # read before the poll, so that what has arrived by then is read too
            ready = [key.data for key, _ in self._selector.select(0.0 if closing else INTERVAL)]
            for connection in ready:
                if connection is not None:
                    self._receive(connection)
                else:
                    fresh = Connection(self._server.accept()[0])
                    self._connections[fresh] = None
                    self._selector.register(fresh, selectors.EVENT_READ, fresh)
            self._judge()
            if closing and not any(ready):
                break
        for connection in self._connections:
            connection.send(bye=True)
            connection.close()
        self._selector.close()
        self._server.close()

    def _judge(self) -> None:
        passed = time.monotonic() - self._looked
        if passed < INTERVAL or self._verdict:
            return
        self._looked += passed
        if all(max(state.quiet, state.stopped) < self._timeout / 2 for state in self._states):
            return
        error = judge(self._unblocked.update(min(passed, LONGEST), self._states), self._timeout)
        if error is not None:
            self._end_all(error, 0.0)

    def _receive(self, connection: Connection) -> None:
        for message in connection.receive():
            rank = self._connections[connection]
            if rank is not None:
                self._note(rank, message)
                continue
            claimed, token = message.get("rank"), str(message.get("token"))
            known = compare_digest(token.encode(errors="replace"), self._token.encode())
            if not known or claimed not in range(len(self._states)):
                connection.open = False
                break
            self._connections[connection] = claimed
            if self._verdict:  # it comes too late
                connection.send(**self._verdict, speak=False)
        if not connection.open:
            self._selector.unregister(connection)
            rank = self._connections.pop(connection)
            connection.close()
            if rank is not None and not self._states[rank].ended:
                self._lost(rank, "its sidecar is gone, and so may be its host")

    def _note(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take in what a sidecar reports of its ``rank``."""
        if "over" in message:
            self._states[rank] = replace(self._states[rank], ended=True)
            if message["over"] not in _IN_ORDER:
                # Provisional: this rank may have failed because of another, whose death is reported a moment later.
                self._provisional = not self._verdict
                self._end_all(RankLostError(f"rank {rank} failed, and the others did not end", rank=rank), GRACE)
                for connection in self._connections:
                    connection.send(hush=True)
        elif "gone" in message:
            self._lost(rank, message["gone"])
        elif "quiet" in message:
            page = Page.parse(base64.b64decode(message["page"])) if "page" in message else self._states[rank].page
            self._states[rank] = RankState(page, message["quiet"], message["stopped"])

    def _lost(self, rank: int, why: str) -> None:
        self._states[rank] = replace(self._states[rank], ended=True)
        left = GRACE
        if self._provisional and self._verdict:  # those that failed before failed because of this one
            self._verdict, self._provisional = {}, False
            left = max(0.0, GRACE - (time.monotonic() - self._ending))
        self._end_all(RankLostError(f"rank {rank} was lost", why=why, rank=rank), left)

    def _end_all(self, error: RankLostError, grace: float) -> None:
        """Tell every sidecar to end its rank after ``grace`` seconds; one of the innocent ranks prints the reason."""
        if self._verdict:
            return
        self._verdict, self._ending = {"end": str(error), "rank": error.rank, "grace": grace}, time.monotonic()
        known = {rank: connection for connection, rank in self._connections.items() if rank is not None}
        innocent = [rank for rank in known if rank != error.rank and not self._states[rank].ended]
        speaker = min(innocent, default=error.rank)
        for rank, connection in known.items():
            connection.send(**self._verdict, speak=rank == speaker)
