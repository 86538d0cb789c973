"""A rank without torch that has a watcher of its own: ``watched_rank.py FOLDER hang|stop|kill|leave``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from megatron_run.contracts.activity import Activity
from megatron_run.errors import ExitCode
from megatron_run_engine.launch.watched import Watched
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.world import World


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    run, activity = RunFolder(folder, 1), Activity()
    run.start()
    watched = Watched(World(launcher="torchrun"), run, 1.0, os.dup(2))
    hub = watched.start_hub()["hub"]
    watched.start(hub, activity)
    assert watched._process is not None
    assert hub["token"] not in str(watched._process.args), "others see the words of a command line"
    (folder / "watcher.pid").write_text(str(watched._process.pid))
    activity.step(1)
    activity.enter("forward", "F0.0")
    if what == "leave":
        watched.close(ExitCode.DONE)
        sys.exit(0)
    if what in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)
    time.sleep(60)


if __name__ == "__main__":
    main()
