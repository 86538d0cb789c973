"""``python -m megatron_run_sweep.child PARENT WORDS...`` becomes ``megatron-run WORDS...``, a run of the sweep PARENT.

Once the sweep's process is gone, however it ended, the run is told to end: it saves its step, and the sweep may go on
with it. Linux alone has this; elsewhere the run goes on, and the sweep waits for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from megatron_run.errors import ExitCode

#: ``PR_SET_PDEATHSIG`` of Linux's ``prctl``; the wish survives an exec.
_DEATH_SIGNAL = 1


def main() -> None:
    """Replace this process by the command."""
    parent, *words = sys.argv[1:]
    call = getattr(ctypes.CDLL(None), "prctl", None)
    if call is not None:
        # The kernel sends it once for each thread of the sweep. Of signals, only this one twice is one wish to a run.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's wish is the sweep's, which nobody hangs up here
        call(_DEATH_SIGNAL, signal.SIGHUP)
        if os.getppid() != int(parent):  # it was gone before
            sys.exit(int(ExitCode.SIGTERM))
    os.execv(sys.executable, [sys.executable, "-m", "megatron_run_cli", *words])


if __name__ == "__main__":
    main()
