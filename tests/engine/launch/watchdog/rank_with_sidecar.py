"""A rank without torch that has a sidecar: ``rank_with_sidecar.py FOLDER hang|lock|stop|kill|leave|hubless``.

It keeps the hub for itself alone, but for ``hubless``: then it is rank 1 of 2, and its hub dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path

from megatron_run.contracts.activity import Activity
from megatron_run.errors import ExitCode
from megatron_run_engine.launch.watchdog.sidecar_client import SidecarClient
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.world import World


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    run, activity = RunFolder(folder, 1), Activity()
    run.start()
    if what == "hubless":
        client = SidecarClient(World(1, 2, launcher="torchrun"), run, 30.0, os.dup(2))
        with socket.create_server(("127.0.0.1", 0)) as hub_host:
            hub = {"hub": f"127.0.0.1:{hub_host.getsockname()[1]}", "token": "secret"}
            client.start(hub["hub"], hub["token"], activity)
            connection, _ = hub_host.accept()
            connection.recv(100)
            connection.close()
    else:
        client = SidecarClient(World(launcher="torchrun"), run, 1.0, os.dup(2))
        hub = client.start_hub()
        client.start(hub["hub"], hub["token"], activity)
    assert client._process is not None
    assert hub["token"] not in str(client._process.args), "others see the words of a command line"
    (folder / "sidecar.pid").write_text(str(client._process.pid))
    activity.step(1)
    activity.enter("forward", "F0.0")
    if what == "leave":
        client.close(ExitCode.DONE)
        sys.exit(0)
    if what in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)
    if what == "lock":
        ctypes.PyDLL(None).sleep(60)  # unlike CDLL, it keeps the interpreter lock: no thread of this process runs
    time.sleep(60)


if __name__ == "__main__":
    main()
