"""One named check of a conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class CheckFailed(AssertionError):
    """The contract is broken; the message says where, what was found and what was expected."""


@dataclass(frozen=True)
class Check:
    """``run()`` returns when the contract holds and raises :class:`CheckFailed` when it does not.

    Where there was nothing to try it with, it says in a few words why.
    """

    name: str
    run: Callable[[], str | None]
