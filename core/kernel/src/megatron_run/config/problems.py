"""Collects errors, so that one pass reports all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_run.errors import Problems, RunError


class Findings:
    """The errors found so far; a run resolves only when there are none."""

    def __init__(self) -> None:
        self.problems: list[RunError] = []

    def __bool__(self) -> bool:
        return bool(self.problems)

    def add(self, error: RunError) -> None:
        """Add an error, or each of several; duplicates are dropped."""
        found = error.problems if isinstance(error, Problems) else (error,)
        known = {str(problem) for problem in self.problems}
        self.problems += [problem for problem in found if str(problem) not in known]

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Add an error raised in the block and continue after it."""
        try:
            yield
        except RunError as error:
            self.add(error)

    def settle(self) -> None:
        """Raise :class:`Problems` when anything was found, caused by it: a traceback shows each to its own cause."""
        if self.problems:
            several = len(self.problems) > 1
            raise Problems(self.problems) from (
                ExceptionGroup("everything that is wrong", self.problems) if several else self.problems[0]
            )
