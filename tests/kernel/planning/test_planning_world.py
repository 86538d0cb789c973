"""A process's place in the world, and the wish to stop."""

from __future__ import annotations

from megatron_run.errors import ExitCode
from megatron_run_engine.runtime.world import StopRequest, World


def test_the_first_to_ask_for_a_stop_decides_the_code() -> None:
    stop = StopRequest()
    assert stop.requested is None
    stop.stop(ExitCode.SIGTERM)
    stop.stop(ExitCode.SIGINT)
    assert stop.requested == ExitCode.SIGTERM


def test_the_first_ranks_of_a_world_are_a_world_of_hosts_with_fewer_ranks() -> None:
    """Of two hosts of four ranks, six train."""
    used = [World(rank, 8, rank % 4, 4).first(6) for rank in range(6)]
    assert [world.size for world in used] == [6] * 6
    assert [world.local_size for world in used] == [4, 4, 4, 4, 2, 2]
    assert [world.local_rank for world in used] == [0, 1, 2, 3, 0, 1]
