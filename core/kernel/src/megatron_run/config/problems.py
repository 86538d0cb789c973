"""Finding everything that is wrong in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_run.errors import Problems, RunError


class Findings:
    """What went wrong so far; a run is resolved only when it stays empty."""

    def __init__(self) -> None:
        self.problems: list[RunError] = []

    def __bool__(self) -> bool:
        return bool(self.problems)

    def add(self, error: RunError) -> None:
        """Remember an error, or each of several, once."""
        found = error.problems if isinstance(error, Problems) else (error,)
        known = {str(problem) for problem in self.problems}
        self.problems += [problem for problem in found if str(problem) not in known]

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Remember an error of the block and go on after it."""
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
