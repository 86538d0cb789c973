"""The rank's side of its sidecar: starts it, shows it the status page, and ends the rank when it orders that."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import IO, Any

from megatron_run.contracts.activity import Activity
from megatron_run.errors import CheckpointError, ExitCode, RankLostError
from megatron_run_engine.launch.watchdog.connection import family_of
from megatron_run_engine.launch.watchdog.page import PageWriter
from megatron_run_engine.launch.watchdog.sidecar import Orders
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.run_folder.opening import VISIBLE_WITHIN
from megatron_run_engine.runtime.world import World

_PROGRAM = (sys.executable, "-P", "-m", "megatron_run_engine.launch.watchdog.sidecar")
#: Seconds that a sidecar has to go: it takes two where ranks do not answer its hub.
_GONE_WITHIN = 10.0


class SidecarClient:
    """This rank's sidecar, and the thread that listens to it.

    When a rank holds up the run, each rank ends with exit code 4 as its sidecar orders. One of them writes the reason
    to the descriptor ``terminal``, and rank 0 writes it into the status.
    """

    def __init__(self, world: World, folder: RunFolder, timeout: float, terminal: int) -> None:
        self._world, self._run_folder, self._terminal = world, folder, terminal
        self._home = tempfile.TemporaryDirectory(prefix="megatron-run-")
        self._page = Path(self._home.name) / "page"
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: PageWriter | None = None
        self._thread = threading.Thread(target=self._listen, name="sidecar", daemon=True)

    def start_hub(self) -> None:
        """Start the sidecar of rank 0, which keeps the hub, and tell the other ranks where it listens.

        They read that, and the secret by which hub and sidecars know each other, from a file in the run folder, which
        only this user may read. The rendezvous would tell the secret to whoever asks, and the place of whoever tells it
        one: somebody who sits there passes the proofs on, and speaks for both once they are given.
        """
        secret = secrets.token_hex(32)
        files = self._run_folder.files
        files.remove(self._secret_file)  # of a job that was killed
        here = self._world.local_size == self._world.size
        host = self._world.init_method.removeprefix("tcp://").rpartition(":")[0]
        host = self._world.host if self._world.left_out else host  # the ranks there may all stand by
        address = _loopback() if here else own_address(host)
        answer = self._launch(secret=secret, listen=address).readline()
        if not answer:
            raise RankLostError(
                f"nobody can watch the ranks: the hub cannot listen at {address or 'any interface'}",
                fix="see that the loopback interface, or that of MASTER_ADDR, is up",
            )
        orders = {"hub": f"{address or host}:{json.loads(answer)['hub']}", "secret": secret}
        with files.create(self._secret_file, mode=0o600) as file:
            file.write(json.dumps(orders).encode())

    def start(self, activity: Activity, visible_within: float = VISIBLE_WITHIN) -> None:
        """Start this rank's sidecar, unless it keeps the hub and runs, and show it ``activity``.

        Raises OSError when the secret is not there after ``visible_within`` seconds, which a network file system needs.
        """
        if self._process is None:
            self._launch(**self._read_secret(time.monotonic() + visible_within))
        self._writer = PageWriter(self._page, activity, ahead=self._world.device != "cpu")
        self._thread.start()

    def forget_secret(self) -> None:
        """Remove the secret, once every rank has it."""
        with suppress(OSError):
            self._run_folder.files.remove(self._secret_file)

    @property
    def _secret_file(self) -> str:
        return f"{self._run_folder.logs.relative_to(self._run_folder.path)}/.hub"

    def _read_secret(self, deadline: float) -> dict[str, str]:
        while True:
            try:
                found: dict[str, str] = json.loads(self._run_folder.files.read(self._secret_file, limit=1024))
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise
            else:
                return found
            time.sleep(0.1)

    def close(self, code: ExitCode) -> None:
        """This rank ends by itself with ``code``."""
        if self._process is not None:
            assert self._process.stdin is not None
            with suppress(OSError), self._process.stdin as pipe:
                pipe.write(b"%d" % code)
        if self._writer is not None:
            self._writer.close()
        with suppress(OSError):
            self._home.cleanup()

    def join(self) -> None:
        """Wait for the end of the sidecar, which :meth:`close` has told to go. One that does not is killed."""
        if self._process is None:
            return
        assert self._process.stdout is not None
        try:
            self._process.wait(_GONE_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._thread.is_alive():
            self._thread.join()  # its end of the pipe reads end-of-file
        self._process.stdout.close()

    def _launch(self, **how: str) -> IO[bytes]:
        """Start the sidecar and give it its orders; its output."""
        orders = Orders(
            rank=self._world.rank,
            size=self._world.size,
            process=os.getpid(),
            page=str(self._page),
            timeout=self._timeout,
            folder=str(self._run_folder.path),
            attempt=self._run_folder.attempt,
            **how,
        )
        self._process = subprocess.Popen(
            _PROGRAM,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):  # a sidecar that is gone already is noticed when its output ends
            self._process.stdin.write(orders.to_json().encode() + b"\n")
        return self._process.stdout

    def _listen(self) -> None:
        """Wait for the order to end, which may never come."""
        assert self._process is not None
        assert self._process.stdout is not None
        for text in self._process.stdout:
            order = json.loads(text)
            if "note" in order:
                with suppress(OSError):  # to the terminal from one rank, from the others to their logs
                    os.write(2 if self._world.rank else self._terminal, f"megatron-run: {order['note']}\n".encode())
            else:
                self._end(order)

    def _end(self, order: Mapping[str, Any]) -> None:
        line = f"{order['end']} (log: {self._run_folder.log(order['rank'])})"
        with suppress(OSError, CheckpointError):  # a full disk or a moved folder must not take the last word
            if self._world.rank == 0:
                self._run_folder.end(ExitCode.RANK_LOST, line)
        with suppress(OSError):
            if order["speak"]:
                os.write(self._terminal, f"megatron-run: {line}\n".encode())
        os._exit(ExitCode.RANK_LOST)  # no exception: the main thread may hang in C


def own_address(host: str, *, loopback: bool = False) -> str:
    """The one address by which the network knows this ``host``; empty when there is none, or several.

    Many hosts know themselves by a loopback address, where nobody else would find them: it counts with ``loopback``.
    """
    found = _addresses(host, socket.AF_INET) or _addresses(host, socket.AF_INET6)
    address = next(iter(found), "")
    if len(found) != 1 or not _is_here(address) or (ip_address(address).is_loopback and not loopback):
        return ""
    return address


def _addresses(host: str, family: socket.AddressFamily) -> set[str]:
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, 0, family, socket.SOCK_STREAM)}
    except OSError:
        return set()


def _loopback() -> str:
    """The address by which processes of this host meet."""
    return "127.0.0.1" if _is_here("127.0.0.1") else "::1"


def _is_here(address: str) -> bool:
    """Whether somebody can listen at ``address``."""
    try:
        with socket.socket(family_of(address)) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
