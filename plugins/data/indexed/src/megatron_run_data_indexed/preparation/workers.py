"""Processes that work on items, with the results in the order of the items.

Each holds one end of a pipe. When the program is killed, the pipe closes, and they end; when one of them is killed, the
program notices at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from types import FrameType, TracebackType
from typing import Any, Generic, Self, TypeVar

from megatron_run.errors import DataError

Item = TypeVar("Item")
#: Items that a process has at most: one at work, one that waits.
DEPTH = 2
#: Signals that end a program in order.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Workers(Generic[Item]):
    """``count`` processes that call ``work`` with items, forked, so that they share what is loaded already.

    Use it as a context manager: it ends them. ``work`` returns nothing: an item's result is a file, so that no pipe
    ever fills in both directions.
    """

    def __init__(self, count: int, work: Callable[[Item], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection[Any, Any]] = []
        self._processes = []
        for _ in range(count):
            parent_end, child_end = context.Pipe()
            self._pipes.append(parent_end)
            process = context.Process(target=_serve, args=(child_end, tuple(self._pipes), work), daemon=True)
            process.start()
            child_end.close()
            self._processes.append(process)

    def map(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield each item, in order, when its work is done; no more than ``DEPTH`` a process are read ahead.

        Raises the :class:`DataError` of the first item that fails, and one if a process is killed.
        """
        waiting: deque[tuple[int, Item]] = deque()
        for number, item in enumerate(items):
            if len(waiting) == DEPTH * len(self._pipes):
                yield self._done(*waiting.popleft())
            place = number % len(self._pipes)
            with suppress(BrokenPipeError, ConnectionResetError):  # told when its answer is missing
                self._pipes[place].send(item)
            waiting.append((place, item))
        while waiting:
            yield self._done(*waiting.popleft())

    def _done(self, place: int, item: Item) -> Item:
        try:
            error = self._pipes[place].recv()
        except (EOFError, ConnectionResetError) as cause:
            process = self._processes[place]
            process.join()
            raise DataError(
                f"process {process.pid} of this preparation has ended with code {process.exitcode}",
                why="the system kills one when memory runs out" if process.exitcode == -signal.SIGKILL else "",
                fix="run the same command again, with fewer --workers: it goes on where it stopped",
            ) from cause
        if error is not None:
            raise DataError(error[0], why=error[1], origin=error[2], fix=error[3])
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if kind is not None:
                process.terminate()
            process.join()


@contextmanager
def process_pool(count: int, start: Callable[..., None], *arguments: object) -> Iterator[ProcessPoolExecutor]:
    """``count`` processes with interpreters of their own, which call ``start`` with ``arguments`` first.

    For libraries whose threads do not survive a fork. They end with this process, however it ends. ``start`` should not
    fail: nobody is told why. Raises :class:`DataError` if one of them is killed.
    """
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin, (start, arguments))
    try:
        with _held_signals():  # half a start would end in the worker's traceback
            for _ in range(count):  # a process for each, since none is idle yet
                pool.submit(int)
        yield pool
    except BrokenProcessPool as cause:
        why = "the system kills one when memory runs out"
        raise DataError("a process of this command has ended", why=why, fix="run it with fewer --workers") from cause
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _held_signals() -> Iterator[None]:
    """Within: what ends a program in order waits for the end of the block, and in processes begun there for ``_begin``.

    These inherit the main thread's mask. Here it does not do: any other thread may hear the signal, and Python then
    tells the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[tuple[int, FrameType | None]] = []
    held = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *arguments: heard.append(arguments)) for number in held}
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        for number, handler in before.items():
            signal.signal(number, handler)
        for first, frame in heard[:1]:
            if callable(handler := signal.getsignal(first)):
                handler(first, frame)
            else:
                os.kill(os.getpid(), first)


def _begin(start: Callable[..., None], arguments: Sequence[object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program hears it, and ends the pool
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _serve(pipe: Connection[Any, Any], others: Iterable[Connection[Any, Any]], work: Callable[[Item], None]) -> None:
    """Work on what comes until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program hears it, and closes the pipe
    signal.set_wakeup_fd(-1)  # the program's: what this process hears is no news to it
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup
            signal.signal(number, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are taken by these processes
    for other in others:  # inherited ends of the program's: as long as one is open, the pipe does not close
        other.close()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            item: Item = pipe.recv()
            try:
                work(item)
                answer = None
            except DataError as error:
                answer = (error.what, error.why, error.origin, error.fix)
            pipe.send(answer)
