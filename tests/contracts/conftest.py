"""Ranks of suites are forked from a process that has loaded what the ranks of all tests need."""

import pytest

from tests.support.ranks import start_server


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Without it the first suite would start a server that lacks what costs each rank half a second to load."""
    start_server()
