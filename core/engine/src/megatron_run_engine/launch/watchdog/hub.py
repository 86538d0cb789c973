"""Where the sidecars of all ranks meet, on however many hosts: the hub judges for all, and tells each what to do.

It lives in the sidecar of rank 0, and not in rank 0, which may be the one that hangs. Messages are JSON, a line each.

A sidecar proves first that it is one (``connection``). Then it sends, every half second, ``quiet`` and ``stopped``, for
how long its rank has been silent or stopped, with the rank's ``page`` when it is silent and the page was not sent yet;
and at the end ``over``, the exit code with which its rank ended by itself, or ``gone``, in what it died.

The hub sends ``end``: end your rank after ``grace`` seconds because of ``rank``, for this reason, which your rank
prints when ``speak``; ``hush``: nobody prints it, for the rank that failed has explained itself; and ``bye`` before it
ends, so that no sidecar takes that for the death of rank 0's host.
"""

from __future__ import annotations

import base64
import resource
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megatron_run.errors import RankLostError
from megatron_run_engine.launch.watchdog.connection import Connection, Stranger, family_of
from megatron_run_engine.launch.watchdog.monitor import INTERVAL, LONGEST
from megatron_run_engine.launch.watchdog.page import Page
from megatron_run_engine.launch.watchdog.verdict import IN_ORDER, RankState, UnblockedTimer, judge

#: Seconds that ranks get to end by themselves once one of them is lost: all are gone within 5.
GRACE = 3.5
#: Seconds that who connects has to prove itself.
_GREETED_WITHIN = 10.0
#: Strangers that are heard at once, unless there are more ranks, and open files besides connections.
_STRANGERS, _OTHER_FILES = 256, 64
#: Connections that are taken between two looks at the ranks.
_AT_ONCE = 256


class Hub:
    """Judges ``size`` ranks by what their sidecars report; a rank hangs after ``timeout`` seconds.

    It listens at ``address``, on every interface when that is empty, and listens to sidecars that know ``secret``. The
    number of strangers is limited, and the oldest leaves first. ``failure`` says why the hub itself has failed: then it
    has sent everybody ``bye``, and nobody compares the ranks any more.
    """

    def __init__(self, size: int, timeout: float, secret: str, address: str) -> None:
        self._timeout, self._secret, self._looked = timeout, secret, time.monotonic()
        self._server = _listening(address, max(size, _AT_ONCE))
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()  # select() knows no descriptor above 1,023
        self._selector.register(self._server, selectors.EVENT_READ)
        self._states, self._unblocked = [RankState(None) for _ in range(size)], UnblockedTimer(timeout, size)
        self._connections: dict[Connection, int] = {}  # of the ranks
        self._strangers: dict[Connection, Stranger] = {}  # the oldest first
        self._most_strangers = min(max(_STRANGERS, size), max(16, _open_files() - size - _OTHER_FILES))
        self._verdict: dict[str, Any] = {}
        self._provisional, self._ending = False, 0.0
        self._closing, self.failure = False, ""
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
        try:
            self._serve()
        except Exception as error:  # whatever it is: a hub that is dead in silence leaves a hang to nobody
            self.failure = f"{type(error).__name__}: {error}"
        for connection in (*self._connections, *self._strangers):
            connection.send(bye=True)
            connection.close()
        self._selector.close()
        self._server.close()

    def _serve(self) -> None:
        while True:
            closing = self._closing  # read before the poll, so that what has arrived by then is read too
            ready = [key.data for key, _ in self._selector.select(0.0 if closing else INTERVAL)]
            for connection in ready:
                if connection is None:
                    self._accept()
                elif connection in self._connections:
                    self._receive(connection)
                elif connection in self._strangers:  # else it was sent away a moment ago
                    self._identify(connection)
            self._send_away()
            self._judge()
            if closing and not any(ready):
                break

    def _accept(self) -> None:
        """Greet who waits, and make room for them."""
        for _ in range(_AT_ONCE):
            try:
                fresh = Connection(self._server.accept()[0])
            except BlockingIOError:
                return
            except OSError:  # there is no room for another file, or who came has left
                self._forget(next(iter(self._strangers), None))
                time.sleep(INTERVAL / 10)  # who waits is there at the next look again
                return
            self._strangers[fresh] = Stranger(fresh)
            self._selector.register(fresh, selectors.EVENT_READ, fresh)
            if len(self._strangers) > self._most_strangers:
                self._forget(next(iter(self._strangers)))

    def _send_away(self) -> None:
        """Close the connections of those who have said nothing for too long."""
        late = time.monotonic() - _GREETED_WITHIN
        while self._strangers and next(iter(self._strangers.values())).since < late:
            self._forget(next(iter(self._strangers)))

    def _forget(self, connection: Connection | None) -> None:
        if connection is not None:
            self._selector.unregister(connection)
            self._strangers.pop(connection, None)
            connection.close()

    def _identify(self, connection: Connection) -> None:
        rank = self._strangers[connection].identify(connection, self._secret, range(len(self._states)))
        if rank is not None:
            del self._strangers[connection]
            self._connections[connection] = rank
            if self._verdict:  # it comes too late
                connection.send(**self._verdict, speak=False)
        elif not connection.open:
            self._forget(connection)

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
        rank = self._connections[connection]
        for message in connection.receive():
            with suppress(ValueError, LookupError, TypeError):  # what no sidecar of ours says is nothing
                self._note(rank, message)
        if not connection.open:
            del self._connections[connection]
            self._forget(connection)
            if not self._states[rank].ended:
                self._lost(rank, "its sidecar is gone, and so may be its host")

    def _note(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take in what a sidecar reports of its ``rank``."""
        if "over" in message:
            self._states[rank] = replace(self._states[rank], ended=True)
            if message["over"] not in IN_ORDER:
                # Provisional: this rank may have failed because of another, whose death is reported a moment later.
                self._provisional = not self._verdict
                self._end_all(RankLostError(f"rank {rank} failed, and the others did not end", rank=rank), GRACE)
                for connection in self._connections:
                    connection.send(hush=True)
        elif "gone" in message:
            self._lost(rank, message["gone"])
        elif "quiet" in message:
            page = Page.parse(base64.b64decode(message["page"])) if "page" in message else self._states[rank].page
            self._states[rank] = RankState(page, _seconds(message["quiet"]), _seconds(message["stopped"]))

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
        known = {rank: connection for connection, rank in self._connections.items()}
        innocent = [rank for rank in known if rank != error.rank and not self._states[rank].ended]
        speaker = min(innocent, default=error.rank)
        for rank, connection in known.items():
            connection.send(**self._verdict, speak=rank == speaker)


def _seconds(said: object) -> float:
    """A length of time that a sidecar reports. Raises ValueError for anything else."""
    if not isinstance(said, int | float) or not 0 <= said < float("inf"):
        raise ValueError(f"{said!r} seconds")
    return float(said)


def _listening(address: str, waiting: int) -> socket.socket:
    """A socket that listens at ``address``, or for whoever comes by IPv4 or IPv6 where it is empty. Raises OSError.

    So many ``waiting`` connections are kept until they are taken. One more is tried again by its system after 1, 3 and
    7 seconds, so that a few strangers would hold up a rank.
    """
    if not address and socket.has_dualstack_ipv6():
        with suppress(OSError):  # a host that is told to have none
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=waiting, dualstack_ipv6=True)
    return socket.create_server((address, 0), family=family_of(address), backlog=waiting)


def _open_files() -> int:
    """How many files this process may have open: as many as it may allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS has a lower limit than the one that it tells
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
