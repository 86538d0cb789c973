"""Resolving runs in tests: the smallest configuration, and what a mistake gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from megatron_run.errors import Problems, RunError
from megatron_run.planning import ResolvedRun, load_config

TINY = "preset:tiny"


def resolved(*configs: Any, **arguments: Any) -> ResolvedRun:
    """The run of ``configs`` (none: ``preset:tiny``), with nothing from the environment."""
    arguments.setdefault("environment", {})
    return load_config(*(configs or (TINY,)), **arguments)


def mistakes(*configs: Any, **arguments: Any) -> tuple[RunError, ...]:
    """The problems that resolving finds."""
    with pytest.raises(Problems) as caught:
        resolved(*configs, **arguments)
    return caught.value.problems


def mistake(*configs: Any, sets: Iterable[str] | Mapping[str, Any] = (), **arguments: Any) -> tuple[str, int]:
    """The line and the exit code of the only problem."""
    (problem,) = mistakes(*configs, sets=sets, **arguments)
    assert "\n" not in str(problem)
    return str(problem), int(problem.exit_code)
