"""Processes of suites are forked from one that has loaded what those of all tests need."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from megatron_run_testing import data
from tests.support.ranks import run_ranks, start_server


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Without it the first suite would start a server that lacks what costs each rank half a second to load."""
    start_server()


@pytest.fixture
def forked_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks of data, for which a suite starts a new Python that imports torch anew, are forked."""
    if "PYTHONHASHSEED" not in os.environ:  # which the server would share
        monkeypatch.setattr(data, "run_elsewhere", _run_forked)


def _run_forked(work: Callable[..., Any], environment: Mapping[str, str], *arguments: object) -> Any:
    """As ``run_elsewhere``: in a process with ``environment``, where ``hash`` of a text is another too."""
    ((hashed, found),) = run_ranks(_work, 1, work, environment, arguments)
    assert hashed != hash("a text")
    return found


def _work(
    rank: int, world: int, work: Callable[..., Any], environment: Mapping[str, str], arguments: tuple[Any, ...]
) -> tuple[int, Any]:
    os.environ.update(environment)
    return hash("a text"), work(*arguments)
