"""JSON messages, a line each, over a socket that never blocks its reader."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

#: Seconds that a write may wait for the other side.
_PATIENCE = 1.0
#: No message of ours is longer: a page has 8 KiB.
_LONGEST = 1 << 16


class Lines:
    """One end of a connection. ``open`` turns false when the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE)
        self._socket, self._rest, self.open = connection, b"", True

    def fileno(self) -> int:
        """For ``select``."""
        return self._socket.fileno()

    def say(self, **message: Any) -> None:
        """Send a message; who is gone hears nothing."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.open = False

    def hear(self) -> Iterator[Mapping[str, Any]]:
        """The messages that have arrived, once ``select`` says that there is something."""
        try:
            data = self._socket.recv(_LONGEST)
        except OSError:
            data = b""
        self.open = self.open and bool(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.open = self.open and len(self._rest) <= _LONGEST
        for line in lines:
            with suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    yield message

    def close(self) -> None:
        """Let go of the connection."""
        self.open = False
        self._socket.close()
