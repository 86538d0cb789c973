"""A rank of torchrun's or Slurm's, watched from outside by a process that it starts: see ``beside``."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_run.contracts.activity import Activity
from megatron_run.errors import ExitCode
from megatron_run_engine.launch.beside import Order
from megatron_run_engine.launch.watchdog.page import PageWriter
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.world import World

_PROGRAM = (sys.executable, "-m", "megatron_run_engine.launch.beside")


class Watched:
    """This rank with its watcher, and the thread that hears from it.

    When another rank, or this one, holds up the run, the rank ends with exit code 4: the watcher has the last word. One
    of the ranks writes the line that says why to the descriptor ``terminal``, and rank 0 writes it into the status.
    """

    def __init__(self, world: World, folder: RunFolder, timeout: float, terminal: int) -> None:
        self._world, self._run_folder, self._terminal = world, folder, terminal
        self._home = tempfile.TemporaryDirectory(prefix="megatron-run-")
        self._page = Path(self._home.name) / "page"
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None

    def start_hub(self) -> dict[str, dict[str, str]]:
        """Start the watcher of rank 0, which the others talk to: the ``hub``, for :meth:`start`."""
        token = secrets.token_hex(16)
        here = self._world.local_size == self._world.size
        self._launch(token=token, listen="127.0.0.1" if here else "")
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        host = "127.0.0.1" if here else self._world.init_method.removeprefix("tcp://").rpartition(":")[0]
        return {"hub": {"hub": f"{host}:{json.loads(line)['hub']}", "token": token}}

    def start(self, hub: Mapping[str, str], activity: Activity) -> None:
        """Start this rank's watcher, unless it keeps the hub and runs, and show it ``phases``."""
        if self._process is None:
            self._launch(**hub)
        PageWriter(self._page, activity, ahead=self._world.device != "cpu")
        threading.Thread(target=self._listen, name="watched", daemon=True).start()

    def close(self, code: ExitCode) -> None:
        """This rank ends by itself with ``code``."""
        if self._process is not None:
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.write(b"%d" % code)
                self._process.stdin.close()
        with suppress(OSError):
            self._home.cleanup()

    def _launch(self, **how: str) -> None:
        order = Order(
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
        with suppress(OSError):  # a watcher that is gone is found out where it is heard
            self._process.stdin.write(order.to_json().encode() + b"\n")

    def _listen(self) -> None:
        """Wait for the word to end, which may never come."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._obey(json.loads(line))

    def _obey(self, word: Mapping[str, Any]) -> None:
        line = f"{word['end']} (log: {self._run_folder.log(word['rank'])})"
        with suppress(OSError):  # a full disk must not take the last word
            if self._world.rank == 0:
                self._run_folder.end(ExitCode.RANK_LOST, line)
        with suppress(OSError):
            if word["speak"]:
                os.write(self._terminal, f"megatron-run: {line}\n".encode())
        os._exit(ExitCode.RANK_LOST)
