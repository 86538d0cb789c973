"""Fork servers that all workers of a whole run share: what one has preloaded took seconds and half a gigabyte.

The process that leads the workers starts them, and tells each worker where they listen. They end with that process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import forkserver, resource_tracker
from typing import Any

from tests.support import interpreted, ranks

#: Where a server listens, and the key that Python 3.14 and later ask for.
Place = tuple[str, bytes | None]
_MODULE: Any = forkserver
_SERVERS: tuple[Any, ...] = (_MODULE._forkserver, interpreted.SERVER)


def start_shared() -> list[Place]:
    """Start the servers, the second where there is something to interpret, and return where they listen."""
    with _nothing_shown():
        ranks.start_server()
        if find_spec("triton"):
            interpreted.start_server()
    started = [server for server in _SERVERS if server._forkserver_address]
    return [(server._forkserver_address, getattr(server, "_forkserver_authkey", None)) for server in started]


def use_shared(places: Sequence[Place]) -> None:
    """Have this process's forks made by the servers at ``places``, which it did not start and cannot wait for."""
    for server, (address, key) in zip(_SERVERS, places, strict=False):
        server._forkserver_address, server._forkserver_authkey = address, key
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # else the write end by which it would live
        server.ensure_running = resource_tracker.ensure_running
    _MODULE.ensure_running = resource_tracker.ensure_running


@contextmanager
def _nothing_shown() -> Iterator[None]:
    """Within: what is started prints nowhere, as where a worker starts it, whose output is captured."""
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
        for descriptor in (nowhere, *kept):
            os.close(descriptor)
