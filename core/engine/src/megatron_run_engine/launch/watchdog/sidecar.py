"""The sidecar of one rank: ``python -m megatron_run_engine.launch.watchdog.sidecar``.

The local launcher watches its ranks itself; torchrun and Slurm do not, so each rank starts one of these. It reports to
the hub, ends its rank when the hub orders it, and ends with its rank. It is a process and not a thread, since a rank
that is stopped, or holds the interpreter lock, can neither report nor end itself.

Its standard input is a pipe from the rank: first its orders (they hold a secret, and a command line is public), at the
end the rank's exit code, or end-of-file without one when the rank is dead. Its standard output tells the rank to end.
It ignores signals, which a scheduler sends to every process: they are meant for the rank.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_run_engine.launch.watchdog.connection import Connection, join_hub
from megatron_run_engine.launch.watchdog.hub import Hub
from megatron_run_engine.launch.watchdog.monitor import INTERVAL, LONGEST, RankMonitor

#: Seconds between two reports, and of silence after which a rank's page is sent: until then nobody needs it.
_REPORT_INTERVAL = 0.5
#: Seconds that a rank gets to end by itself once it was told to.
_OBEY_WITHIN = 1.0
#: Seconds in which the hub must answer, and after which a sidecar that was sent away comes again.
_REACH_WITHIN, _COME_AGAIN = 20.0, 0.2


@dataclass(frozen=True)
class Orders:
    """The orders of a sidecar: its ``rank`` of ``size``, the rank's ``process`` and ``page``, the time limit.

    ``hub`` is ``host:port``; empty for the sidecar that keeps the hub, which listens at ``listen`` and writes the
    status of the ``attempt`` in the run ``folder`` when its rank no longer can.
    """

    rank: int
    size: int
    process: int
    page: str
    timeout: float
    secret: str
    folder: str
    attempt: int
    hub: str = ""
    listen: str = ""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


class Sidecar:
    """The sidecar of one rank, at work."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._monitor = RankMonitor(Path(orders.page))
        self._hub: Hub | None = None
        if not orders.hub:
            self._hub = Hub(orders.size, orders.timeout, orders.secret, orders.listen)
            self._hub.start()
            tell_rank(hub=self._hub.port)
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._connection = self._reach_hub()
        self._sent, self._reported = 0, 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []  # what to do to the rank, and when
        self._message, self._hushed, self._blind = "", False, False

    def run(self) -> None:
        """Watch until the rank is gone, or has announced that it ends by itself."""
        last = time.monotonic()
        while True:
            ready = {key.fd: key.data for key, _ in self._selector.select(INTERVAL)}
            announcement = os.read(0, 100) if 0 in ready else b""
            # A child of the rank may hold the pipe open after the rank's death: then only the parent has changed.
            if 0 in ready or os.getppid() != self._orders.process:
                self._leave(announcement)
                return
            if self._connection is not None and self._connection in ready.values():
                self._obey(self._connection)
            if self._hub is not None and self._hub.failure and not self._blind:
                self._blind = True
                self._tell_blind(f"the hub has failed: {self._hub.failure}")
            now = time.monotonic()
            self._monitor.look(min(now - last, LONGEST))
            last = now
            if now - self._reported >= _REPORT_INTERVAL:
                self._reported = now
                self._report()
            while self._due and self._due[0][0] <= now:
                self._due.pop(0)[1]()

    def _reach_hub(self) -> Connection | None:
        """The connection to the hub; None where it cannot be reached: then nobody compares this rank with others."""
        host, _, port = self._orders.hub.rpartition(":")
        at = (host, int(port)) if self._hub is None else (self._orders.listen or "127.0.0.1", self._hub.port)
        try:
            connection = reach_hub(at, self._orders.rank, self._orders.secret, _REACH_WITHIN)
        except ConnectionError as error:
            self._tell_blind(str(error))
            return None
        self._selector.register(connection, selectors.EVENT_READ, connection)
        return connection

    def _tell_blind(self, why: str) -> None:
        tell_rank(note=f"rank {self._orders.rank} is not compared with the others: {why}; a hang may go unnoticed")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None

    def _send(self, **message: Any) -> None:
        if self._connection is not None:
            self._connection.send(**message)

    def _report(self) -> None:
        """Tell the hub for how long the rank has been silent, and each page once."""
        state = self._monitor.state()
        page: dict[str, str] = {}
        if state.page is not None and state.quiet >= _REPORT_INTERVAL and state.page.changes != self._sent:
            with suppress(OSError):  # a rank that ends by itself removes its page
                content = Path(self._orders.page).read_bytes().rstrip(b"\0")
                page, self._sent = {"page": base64.b64encode(content).decode()}, state.page.changes
        self._send(quiet=state.quiet, stopped=state.stopped, **page)

    def _obey(self, connection: Connection) -> None:
        for message in connection.receive():
            if "bye" in message:
                self._disconnect()
                return
            if "hush" in message:
                self._hushed = True
                continue
            self._message = str(message["end"])
            self._end_rank(message["grace"], **{key: message[key] for key in ("end", "rank", "speak")})
        if not connection.open:
            self._disconnect()
            if not self._due and self._hub is None:  # the hub is dead: it would have said good-bye
                lost = "rank 0 was lost: its sidecar is gone, and so may be its host"
                self._end_rank(2 * _OBEY_WITHIN, end=lost, rank=0, speak=False)

    def _end_rank(self, grace: float, **line: Any) -> None:
        """After ``grace`` seconds tell the rank why it must end; kill it when it does not."""

        def tell() -> None:
            tell_rank(**{**line, "speak": line["speak"] and not self._hushed})
            os.kill(self._orders.process, signal.SIGCONT)  # a stopped rank cannot obey

        start = time.monotonic() + grace
        self._due = [(start, tell), (start + _OBEY_WITHIN, lambda: os.kill(self._orders.process, signal.SIGKILL))]

    def _leave(self, announcement: bytes) -> None:
        """Tell the hub how the rank ended: by its announcement, or without one, when it is dead and cannot clean up."""
        if announcement:
            self._send(over=int(announcement))
            if self._hub is not None:
                self._hub.finish(within=2.0)
            return
        page = self._monitor.page()
        why = f"its process ended without a word in {page.place if page is not None else 'the beginning'}"
        self._send(gone=why)
        if self._hub is not None:
            self._hub.finish(within=2.0)
            self._write_status(self._message or f"rank {self._orders.rank} was lost: {why}")
        shutil.rmtree(Path(self._orders.page).parent, ignore_errors=True)

    def _write_status(self, message: str) -> None:
        """End the attempt in ``status.json``, which rank 0 could not do."""
        from megatron_run.errors import CheckpointError, ExitCode
        from megatron_run_engine.run_folder import RunFolder

        with suppress(OSError, CheckpointError):
            folder = RunFolder(Path(self._orders.folder), self._orders.attempt)
            status = folder.read_status()
            if status is not None and status.exit_code is None and status.attempt == self._orders.attempt:
                folder.end(ExitCode.RANK_LOST, message)


def reach_hub(at: tuple[str, int], rank: int, secret: str, within: float) -> Connection:
    """A connection to the hub at ``at``, which knows it for that of ``rank``.

    A hub that is flooded sends the oldest stranger away, and that may be a sidecar: it comes again, ``within`` seconds
    in all. Raises ConnectionError, which says why there is no hub.
    """
    deadline, where = time.monotonic() + within, f"{at[0]}:{at[1]}"
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = Connection(socket.create_connection(at, timeout=left))
        except OSError as error:
            raise ConnectionError(f"the hub at {where} cannot be reached: {error.strerror or error}") from error
        if join_hub(connection, rank, secret, deadline - time.monotonic()):
            return connection
        no_hub = connection.open
        connection.close()
        if no_hub:
            raise ConnectionError(f"who listens at {where} is not the hub of this run")
        time.sleep(min(_COME_AGAIN, max(0.0, deadline - time.monotonic())))
    raise ConnectionError(
        f"the hub at {where} has sent it away again and again for {within:g} s, as if it were flooded"
    )


def tell_rank(**line: Any) -> None:
    """Write a line to the rank."""
    with suppress(OSError):
        os.write(1, json.dumps(line).encode() + b"\n")


def main() -> None:
    """Watch as the first line of standard input orders."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):  # unbuffered: what follows is for the selector
        line += byte
    if line:
        with suppress(BrokenPipeError):
            Sidecar(Orders(**json.loads(line))).run()


if __name__ == "__main__":
    main()
