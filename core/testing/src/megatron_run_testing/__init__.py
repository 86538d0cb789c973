"""Conformance suites for plugin authors: one per kind, each a tuple of named checks.

``<kind>_checks(...)`` takes the object that the plugin's factory creates or, for kinds that need a context, a function
that creates it. It returns :class:`~megatron_run_testing.Check` objects. If the contract is broken, a check
raises :class:`~megatron_run_testing.CheckFailed`, which states where. With pytest::

    from megatron_run_testing.schedule import schedule_checks

    @pytest.mark.parametrize("check", schedule_checks(MySchedule()), ids=lambda check: check.name)
    def test_conforms(check):
        check.run()
"""

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
