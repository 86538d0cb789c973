"""How a command ends that is told to: as after an error, so that what it has begun is undone, and in one line."""

from __future__ import annotations

import signal
from types import FrameType


class Terminated(BaseException):
    """The signal ``number`` came. Not an Exception, which a library might take for its own."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")


def raise_when_terminated() -> None:
    """Let SIGTERM and SIGHUP raise :class:`Terminated` in the main thread; a second one ends the process at once.

    A training has handlers of its own instead. SIGHUP stays ignored where it is, as nohup wants it.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _raise)


def _raise(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Terminated(number)
