"""The checks of a conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class CheckFailed(AssertionError):
    """The contract is broken; the message states where, what was found and what was expected."""


@dataclass(frozen=True)
class Check:
    """A named check: ``run()`` raises :class:`CheckFailed` if the contract is broken.

    Otherwise it returns None or "", or the reason why the plugin has nothing to which the check applies.
    """

    name: str
    run: Callable[[], str | None]
