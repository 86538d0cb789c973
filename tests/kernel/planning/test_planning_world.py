"""A process's place in the world, and the wish to stop."""

from __future__ import annotations

from megatron_run.errors import ExitCode
from megatron_run_engine.runtime.world import StopRequest


def test_the_first_to_ask_for_a_stop_decides_the_code() -> None:
    stop = StopRequest()
    assert stop.requested is None
    stop.stop(ExitCode.SIGTERM)
    stop.stop(ExitCode.SIGINT)
    assert stop.requested == ExitCode.SIGTERM
