"""Injects the faults that tests request: a listener of this rank's activity."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import torch

from megatron_run.config.faults import Fault, read_faults
from megatron_run.contracts import Lender
from megatron_run.contracts.activity import BACKGROUND, Collective
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_engine.runtime.parameter_init import has_memory, trained

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.nn import Parameter

    from megatron_run.contracts.activity import Activity
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.training.build import Assembly

_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
#: Exit code of a rank that exits without reporting anything.
SILENT = 9


def install_faults(run: ResolvedRun, assembly: Assembly, attempt: int) -> None:
    """Install the faults that the environment of ``run`` requests for this rank in this ``attempt``.

    Call it after all other listeners are installed, so that they know the new activity before a fault delays it.
    """
    parameters = [parameter for described in assembly.infos for parameter in trained(described)]
    faults = read_faults(run.request.environment)  # some may be of ranks that run.elastic leaves out
    lender = assembly.optimizer if isinstance(assembly.optimizer, Lender) else None
    add_faults(faults, assembly.context.groups.activity, assembly.context.topology.rank, attempt, parameters, lender)


def add_faults(
    faults: Iterable[Fault],
    activity: Activity,
    rank: int,
    attempt: int,
    parameters: Sequence[Parameter],
    lender: Lender | None = None,
) -> None:
    """Install those of ``faults`` that concern this rank and attempt as a listener of ``activity``, if there are any.

    ``parameters`` are the rank's, whose gradients and weights a fault may corrupt; what ``lender`` keeps of them too.
    """
    injected = [fault for fault in faults if fault.rank in (None, rank) and fault.attempt in (None, attempt)]
    if injected:
        activity.listeners.append(_FaultInjector(injected, rank, parameters, lender))


class _FaultInjector:
    """Counts how often each activity is entered in a step, and injects a fault when its count is reached.

    The thread of an asynchronous save enters collectives concurrently, in no fixed order with the training's, so both
    are counted separately.
    """

    def __init__(
        self, faults: Sequence[Fault], rank: int, parameters: Sequence[Parameter], lender: Lender | None
    ) -> None:
        self._faults, self._rank, self._parameters, self._lender = faults, rank, parameters, lender
        self._entered: Counter[tuple[int, str, bool]] = Counter()

    def __call__(self, step: int, phase: str, detail: object) -> None:
        """Note that the rank enters ``phase``."""
        entered = step, phase, isinstance(detail, Collective) and detail.scope == BACKGROUND
        self._entered[entered] += 1
        for fault in self._faults:
            if fault.strikes(step, phase, self._entered[entered]):
                _log(f"fault: {fault.kind} on rank {self._rank} in step {step}, {phase}{f' {detail}' * bool(detail)}")
                self._strike(fault, str(detail))

    def _strike(self, fault: Fault, detail: str) -> None:
        if fault.kind in _SIGNALS:
            _signal(_SIGNALS[fault.kind], fault.after)
        elif fault.kind == "exit":
            os._exit(SILENT)
        elif fault.kind == "hang":
            while True:
                time.sleep(3600)
        elif fault.kind == "slow":
            time.sleep(fault.seconds)
        elif fault.kind == "oom":
            raise MemoryError
        elif fault.kind == "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), detail or None)
        elif fault.kind == "flip":
            weights = (*(values for values, _ in self._kept()), *filter(has_memory, self._parameters))
            learned = (values for values in weights if values.detach().any())  # the rest is padding
            flip_bit(next(learned, weights[0]))
        else:
            gradients = [gradient for _, gradient in self._kept()]
            for gradient in (*gradients, *filter(has_memory, map(main_grad, self._parameters))):
                gradient.fill_(float(fault.kind))

    def _kept(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """The shares of parameters and gradients that a lender keeps: these are whole only at times."""
        return () if self._lender is None else self._lender.kept()


def _signal(number: signal.Signals, after: float) -> None:
    """Send this process a signal, at once or from a timer thread after ``after`` seconds."""
    if not after:
        os.kill(os.getpid(), number)
        return
    timer = threading.Timer(after, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def flip_bit(parameter: torch.Tensor) -> None:
    """Flip a high mantissa bit of the value in the middle of ``parameter``; zeros may be padding, of no tensor."""
    values = parameter.detach().view(-1)
    places = values.nonzero().view(-1)
    middle = int(places[len(places) // 2]) if len(places) else len(values) // 2
    values[middle : middle + 1].view(torch.uint8)[-2] ^= 0x20


def _log(text: str) -> None:
    """Write ``text`` to the rank's log, unbuffered: the process may end before a buffer is flushed."""
    os.write(2, f"{text}\n".encode())
