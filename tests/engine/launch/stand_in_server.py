"""The fork server without torch: ``stand_in_server.py PIDS HOW BEHAVIOUR... CONTROL LAUNCHER``.

HOW is what an import does: nothing (``plain``), it brings ``numpy``, starts a thread (``thread``), or takes long
(``slow``); where it is ``crowded``, the machine has no room for one more process.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from megatron_run_engine.launch import fork_server
from megatron_run_engine.launch.job import Job
from tests.engine.launch import stand_in_rank

_, PIDS, HOW, *TOLD, CONTROL, LAUNCHER = sys.argv


def preload(_job: Job) -> None:
    if HOW == "numpy":
        import numpy.random  # noqa: F401  # has a generator that is seeded when it is imported
    if HOW == "thread":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    Path(PIDS, "server.pid").write_text(str(os.getpid()))
    if HOW == "slow":
        time.sleep(60)
    if HOW == "crowded":
        os.fork = refuse


def refuse() -> int:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def be_stand_in(job: Path, _run: None) -> int:
    stand_in_rank.RANK = int(os.environ["RANK"])
    sys.argv[1:] = [PIDS, *TOLD, str(job)]
    stand_in_rank.main()
    return 0


if __name__ == "__main__":
    program = (sys.executable, str(Path(stand_in_rank.__file__)), PIDS, *TOLD)
    for name, stand_in in {"preload": preload, "main": be_stand_in, "RANK_PROGRAM": program}.items():
        setattr(fork_server, name, stand_in)
    cuda = SimpleNamespace(is_initialized=lambda: False)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)  # type: ignore[assignment]  # all that is asked of it
    sys.exit(fork_server.serve(socket.socket(fileno=int(CONTROL)), int(LAUNCHER)))
