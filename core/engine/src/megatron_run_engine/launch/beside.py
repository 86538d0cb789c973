"""The program that watches one rank from outside: ``python -m megatron_run_engine.launch.beside``.

Where our launcher started the ranks it watches them all; torchrun and Slurm do not, so each rank starts one of these.
It talks to the watchers of the other ranks at their hub, ends its rank when it is told to, and ends with it. It ignores
signals: they are meant for the rank. The first line that it reads is its order, which holds a secret: others see the
words of a command line.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_run_engine.launch.watchdog.hub import Hub
from megatron_run_engine.launch.watchdog.lines import Lines
from megatron_run_engine.launch.watchdog.watcher import INTERVAL, LONGEST, RankWatch

#: Seconds between two reports, and of silence after which a rank's page is sent: until then nobody needs it.
_SENT_AFTER = 0.5
#: Seconds that a rank gets to end by itself once it was told to.
_TO_OBEY = 1.0
#: Seconds in which the hub must answer.
_REACH = 20.0


@dataclass(frozen=True)
class Order:
    """What a watcher is told: its ``rank`` of ``size``, the rank's ``process`` and ``page``, the time limit.

    ``hub`` is ``host:port``; empty for the one that keeps it, which listens at ``listen`` and writes the status of the
    ``attempt`` in the run ``folder`` when its rank no longer can.
    """

    rank: int
    size: int
    process: int
    page: str
    timeout: float
    token: str
    folder: str
    attempt: int
    hub: str = ""
    listen: str = ""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


class Beside:
    """The watcher of one rank, at work."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._rank = RankWatch(Path(order.page))
        self._hub = None if order.hub else Hub(order.size, order.timeout, order.token, order.listen)
        if self._hub is not None:
            self._hub.start()
            tell(hub=self._hub.port)
        self._lines = self._reach()
        self._sent, self._reported = 0, 0.0
        self._acts: list[tuple[float, Callable[[], None]]] = []
        self._message, self._hushed = "", False

    def run(self) -> None:
        """Watch until the rank is gone, or says that it needs no watcher any more."""
        last = time.monotonic()
        while True:
            waited: list[int | Lines] = [0, *self._connected()]
            ready = select.select(waited, [], [], INTERVAL)[0]
            word = os.read(0, 100) if 0 in ready else b""
            if word or 0 in ready or os.getppid() != self._order.process:
                self._leave(word)
                return
            if self._lines in ready and self._lines is not None:
                self._hear(self._lines)
            now = time.monotonic()
            self._rank.look(min(now - last, LONGEST))
            last = now
            if now - self._reported >= _SENT_AFTER:
                self._reported = now
                self._report()
            while self._acts and self._acts[0][0] <= now:
                self._acts.pop(0)[1]()

    def _reach(self) -> Lines | None:
        """The connection to the hub; None where it cannot be reached: then nobody compares this rank with others."""
        host, _, port = self._order.hub.rpartition(":")
        at = (host, int(port)) if self._hub is None else (self._order.listen or "127.0.0.1", self._hub.port)
        try:
            lines = Lines(socket.create_connection(at, timeout=_REACH))
        except OSError:
            return None
        lines.say(rank=self._order.rank, token=self._order.token)
        return lines

    def _connected(self) -> list[Lines]:
        return [self._lines] if self._lines is not None and self._lines.open else []

    def _leave(self, word: bytes) -> None:
        """Tell the hub how the rank ended: by its word, or with none, when it is dead and cannot clean up."""
        page = self._rank.page()
        why = f"its process ended without a word in {page.place if page is not None else 'the beginning'}"
        if word:
            self._say(over=int(word))
        else:
            self._say(gone=why)
        if self._hub is not None:
            self._hub.finish(within=2.0)
            if not word:
                self._write_status(self._message or f"rank {self._order.rank} was lost: {why}")
        if not word:
            shutil.rmtree(Path(self._order.page).parent, ignore_errors=True)

    def _hear(self, lines: Lines) -> None:
        for message in lines.hear():
            if "bye" in message:
                lines.close()
                return
            if "hush" in message:
                self._hushed = True
                continue
            self._message = str(message["end"])
            self._end_rank(message["grace"], **{key: message[key] for key in ("end", "rank", "speak")})
        if not lines.open and not self._acts and self._hub is None:  # the hub is dead: it would have said good-bye
            lost = "rank 0 was lost: its watcher is gone, and so may be its host"
            self._end_rank(2 * _TO_OBEY, end=lost, rank=0, speak=False)

    def _end_rank(self, grace: float, **line: Any) -> None:
        """After ``grace`` seconds tell the rank why it ends; then kill it."""
        start = time.monotonic() + grace
        self._acts = [(start, lambda: self._tell_rank(line)), (start + _TO_OBEY, self._kill)]

    def _tell_rank(self, line: dict[str, Any]) -> None:
        tell(**{**line, "speak": line["speak"] and not self._hushed})
        os.kill(self._order.process, signal.SIGCONT)

    def _kill(self) -> None:
        os.kill(self._order.process, signal.SIGKILL)

    def _report(self) -> None:
        """Say how long the rank has been silent, and once what it said last."""
        seen = self._rank.seen()
        page: dict[str, str] = {}
        if seen.page is not None and seen.quiet >= _SENT_AFTER and seen.page.changes != self._sent:
            with suppress(OSError):  # a rank that ends by itself takes its page away
                content = Path(self._order.page).read_bytes().rstrip(b"\0")
                page, self._sent = {"page": base64.b64encode(content).decode()}, seen.page.changes
        self._say(quiet=seen.quiet, stopped=seen.stopped, **page)

    def _say(self, **message: Any) -> None:
        if self._lines is not None and self._lines.open:
            self._lines.say(**message)

    def _write_status(self, message: str) -> None:
        """End the attempt in ``status.json``: rank 0 is dead, and did not."""
        from megatron_run.errors import ExitCode
        from megatron_run_engine.run_folder import RunFolder

        with suppress(OSError):
            folder = RunFolder(Path(self._order.folder), self._order.attempt)
            status = folder.read_status()
            if status is not None and status.exit_code is None and status.attempt == self._order.attempt:
                folder.end(ExitCode.RANK_LOST, message)


def tell(**line: Any) -> None:
    """Say something to the rank."""
    with suppress(OSError):
        os.write(1, json.dumps(line).encode() + b"\n")


def _first_line() -> bytes:
    """Byte by byte: what follows is for ``select``."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def main() -> None:
    """Watch as the first line orders."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    if line := _first_line():
        with suppress(BrokenPipeError):
            Beside(Order(**json.loads(line))).run()


if __name__ == "__main__":
    main()
