"""A rank without torch that has a sidecar: ``rank_with_sidecar.py FOLDER hang|lock|stop|kill|leave|hubless|impostor``.

It keeps the hub for itself alone, but for ``hubless`` and ``impostor``: then it is rank 1 of 2, and its hub dies, or
does not know the secret and orders it to end.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from megatron_run.contracts.activity import Activity
from megatron_run.errors import ExitCode
from megatron_run_engine.launch.watchdog.connection import Connection, Stranger
from megatron_run_engine.launch.watchdog.sidecar_client import SidecarClient
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.world import World


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    run, activity = RunFolder(folder, 1), Activity()
    run.start()
    if what in ("hubless", "impostor"):
        secret = "handed down by rank 0"
        client = SidecarClient(World(1, 2, launcher="torchrun"), run, 30.0, os.dup(2))
        run.files.make("logs/attempt-001")
        with socket.create_server(("127.0.0.1", 0)) as hub_host:
            told = {"hub": f"127.0.0.1:{hub_host.getsockname()[1]}", "secret": secret}
            run.files.write_json("logs/attempt-001/.hub", told)
            client.start(activity)
            connection = Connection(hub_host.accept()[0])
            knows = secret if what == "hubless" else "another"
            assert Stranger(connection).identify(connection, knows, range(2)) == (1 if what == "hubless" else None)
            if what == "impostor":
                connection.send(proof="of nothing")
                connection.send(end="by order", rank=0, grace=0, speak=True)
            connection.close()
    else:
        run.files.make("logs/attempt-001")
        client = SidecarClient(World(launcher="torchrun"), run, 1.0, os.dup(2))
        client.start_hub()
        client.start(activity)
        file = folder / "logs" / "attempt-001" / ".hub"
        assert file.stat().st_mode & 0o77 == 0, "only this user may read it"
        secret = json.loads(file.read_text())["secret"]
        client.forget_secret()
        assert not file.exists()
    assert client._process is not None
    assert secret not in str(client._process.args), "others see the words of a command line"
    (folder / "sidecar.pid").write_text(str(client._process.pid))
    activity.step(1)
    activity.enter("forward", "F0.0")
    if what in ("leave", "impostor"):
        client.close(ExitCode.DONE)
        for thread in threading.enumerate():
            if thread.name == "sidecar":
                thread.join()  # what the sidecar has said is written
        sys.exit(0)
    if what in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)
    if what == "lock":
        ctypes.PyDLL(None).sleep(60)  # unlike CDLL, it keeps the interpreter lock: no thread of this process runs
    time.sleep(60)


if __name__ == "__main__":
    main()
