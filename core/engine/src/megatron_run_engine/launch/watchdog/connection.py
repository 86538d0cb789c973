"""A connection between a sidecar and the hub: lines of JSON, once each end has proved that it knows the secret.

The hub sends a random nonce, the sidecar answers with its rank, its own nonce and a proof, the hub with a proof over
the same. A proof is an HMAC-SHA256 of who gives it, rank and both nonces, so that none can be used again, and the
secret itself is never sent. Whoever can read the job's traffic learns nothing from it; lines are not encrypted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

#: Seconds that a write may wait for the other side.
_SEND_TIMEOUT = 1.0
#: No message of ours is longer: a page has 8 KiB.
_LONGEST_LINE = 1 << 16
#: No message is longer before both ends know each other.
_LONGEST_GREETING = 512


def family_of(address: str) -> socket.AddressFamily:
    """Of numbers with points or with colons."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class Connection:
    """One end of a connection. ``open`` turns false when the other end is gone, or sends a line over the limit."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_TIMEOUT)
        self._socket, self._rest, self.open = connection, b"", True

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; to an end that is gone it is lost."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.open = False

    def receive(self, longest: int = _LONGEST_LINE) -> Iterator[Mapping[str, Any]]:
        """The messages that have arrived, once a selector reports the connection as readable."""
        try:
            data = self._socket.recv(longest)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.open = self.open and bool(data) and len(self._rest) <= longest
        for line in lines:
            with suppress(ValueError, RecursionError):
                message = json.loads(line)
                if isinstance(message, dict):
                    yield message

    def _next(self, deadline: float) -> Mapping[str, Any]:
        """The next message and nothing of what follows it. Raises OSError or ValueError."""
        line = b""
        while not line.endswith(b"\n"):
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            byte = self._socket.recv(1)
            if not byte or len(line) > _LONGEST_GREETING:
                raise ConnectionError
            line += byte
        self._socket.settimeout(_SEND_TIMEOUT)
        message = json.loads(line)
        return message if isinstance(message, dict) else {}

    def close(self) -> None:
        """Close this end. A selector must have forgotten it before."""
        self.open = False
        self._socket.close()


def join_hub(connection: Connection, rank: int, secret: str, within: float) -> bool:
    """The sidecar's part of the handshake, ``within`` seconds at most: whether it is our hub, and knows us for ours.

    Where no proof has come ``connection.open`` is false: the other end may be our hub, and too busy with strangers.
    """
    deadline, own_nonce = time.monotonic() + within, secrets.token_hex(16)
    try:
        hub_nonce = str(connection._next(deadline).get("nonce"))
        connection.send(rank=rank, nonce=own_nonce, proof=_proof(secret, "sidecar", rank, hub_nonce, own_nonce))
        answer = str(connection._next(deadline).get("proof"))
    except (OSError, ValueError):
        connection.open = False
        return False
    return _same(answer, _proof(secret, "hub", rank, hub_nonce, own_nonce))


class Stranger:
    """A sidecar, or somebody else, whom the hub does not know yet. It was greeted at ``since``."""

    def __init__(self, connection: Connection) -> None:
        self.since = time.monotonic()
        self._nonce = secrets.token_hex(16)
        connection.send(nonce=self._nonce)

    def identify(self, connection: Connection, secret: str, ranks: range) -> int | None:
        """Read the answer: the rank that has proved itself, or None. A wrong answer closes the connection."""
        for message in connection.receive(_LONGEST_GREETING):
            rank, nonce, given = message.get("rank"), str(message.get("nonce")), str(message.get("proof"))
            proof = _proof(secret, "sidecar", rank, self._nonce, nonce)
            if type(rank) is int and rank in ranks and _same(given, proof):
                connection.send(proof=_proof(secret, "hub", rank, self._nonce, nonce))
                return rank
            connection.open = False
            break
        return None


def _proof(secret: str, who: str, rank: object, hub: str, sidecar: str) -> str:
    text = json.dumps([who, rank, hub, sidecar])
    return hmac.digest(secret.encode(), text.encode(), "sha256").hex()


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())
