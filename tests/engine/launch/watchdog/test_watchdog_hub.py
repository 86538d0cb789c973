"""Sidecars of several ranks at their hub: what each reports, and what all are told."""

from __future__ import annotations

import base64
import resource
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_run.contracts.activity import Activity
from megatron_run_engine.launch.watchdog.hub import GRACE, Connection, Hub
from megatron_run_engine.launch.watchdog.page import PageWriter
from tests.support.processes import wait_until

LIMIT, TOKEN = 5.0, "word"


class Site:
    """A hub of three ranks, and a connection for the sidecar of each."""

    def __init__(self, folder: Path) -> None:
        self.hub = Hub(3, LIMIT, TOKEN, "127.0.0.1")
        self.hub.start()
        self.sidecars = [self.connect(rank) for rank in range(3)]
        self.folder = folder
        wait_until(lambda: set(self.hub._connections.values()) == {0, 1, 2})

    def connect(self, rank: int, token: str = TOKEN) -> Connection:
        connection = Connection(socket.create_connection(("127.0.0.1", self.hub.port)))
        connection.send(rank=rank, token=token)
        return connection

    def report(self, rank: int, quiet: float, *, inside: bool, stopped: float = 0.0) -> None:
        """Rank ``rank`` is silent, in a collective of all three or computing."""
        activity, path = Activity(), self.folder / f"page-{rank}"
        activity.members["world"] = (0, 1, 2)
        PageWriter(path, activity)
        activity.step(4)
        activity.enter("optimizer" if inside else "backward")
        if inside:
            activity.collective("all-reduce", "world", 2).__enter__()
        page = base64.b64encode(path.read_bytes().rstrip(b"\0")).decode()
        self.sidecars[rank].send(quiet=quiet, stopped=stopped, page=page)

    def told(self, rank: int, seconds: float = 3.0) -> list[dict[str, Any]]:
        """What the sidecar of ``rank`` is told next; nothing within so many seconds is an empty list."""
        if not select.select([self.sidecars[rank]], [], [], seconds)[0]:
            return []
        return [dict(message) for message in self.sidecars[rank].receive()]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.hub.finish(2.0)
    for each in site.sidecars:
        each.close()


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_a_silent_rank_ends_all_at_once_and_one_of_the_others_speaks(site: Site, guilty: int) -> None:
    for rank in sorted(range(3), key=lambda rank: rank == guilty):
        site.report(rank, LIMIT if rank == guilty else LIMIT - 1, inside=rank != guilty)
    spoke = []
    for rank in range(3):
        (message,) = site.told(rank)
        assert message["end"].startswith(f"rank {guilty} hangs: nothing new for 5.0 s in backward of step 4")
        assert message["rank"] == guilty
        assert message["grace"] == 0
        spoke.append(message["speak"])
    assert spoke.count(True) == 1
    assert not spoke[guilty]


def test_who_waits_for_a_rank_that_goes_on_is_left_in_peace(site: Site) -> None:
    for rank in range(3):
        site.report(rank, 0.0 if rank == 1 else 3 * LIMIT, inside=rank != 1)
    assert site.told(0, 0.5) == []


def test_a_rank_that_dies_without_a_word_gives_the_others_a_moment_to_say_more(site: Site) -> None:
    site.sidecars[2].send(gone="its process ended without a word in forward F0.0 of step 4")
    for rank in (0, 1):
        (message,) = site.told(rank)
        assert message["end"] == "rank 2 was lost: its process ended without a word in forward F0.0 of step 4"
        assert (message["rank"], message["grace"]) == (2, GRACE)


def test_where_a_rank_has_said_itself_why_it_ends_no_sidecar_says_it_again(site: Site) -> None:
    site.sidecars[2].send(gone="its process ended without a word in forward F0.0 of step 4")
    assert [message["rank"] for message in site.told(0)] == [2]
    site.sidecars[1].send(over=4)
    assert site.told(0) == [{"hush": True}]


def test_a_rank_that_died_is_the_reason_why_its_neighbour_failed_whoever_was_heard_first(site: Site) -> None:
    site.sidecars[1].send(over=4)
    first, hush = site.told(0)
    assert (first["rank"], hush) == (1, {"hush": True})
    site.sidecars[2].send(gone="its process ended without a word in forward F0.0 of step 4")
    (then,) = site.told(0)
    assert then["end"].startswith("rank 2 was lost: ")
    assert then["grace"] < GRACE
    site.sidecars[0].send(gone="killed, as it was told")  # what follows from that is no news
    assert site.told(0, 0.3) == []


def test_a_host_that_vanishes_takes_its_rank_with_it(site: Site) -> None:
    site.sidecars[1].close()
    (message,) = site.told(0)
    assert message["end"] == "rank 1 was lost: its sidecar is gone, and so may be its host"


@pytest.mark.parametrize(("code", "ends"), [(0, False), (143, False), (75, False), (5, True), (1, True)])
def test_an_end_that_was_planned_ends_nobody_else_and_a_failure_does(site: Site, code: int, ends: bool) -> None:
    site.sidecars[1].send(over=code)
    site.sidecars[1].close()
    found = site.told(0, 3.0 if ends else 0.5)
    assert bool(found) == ends
    if ends:
        assert found[0]["end"] == "rank 1 failed, and the others did not end"


def test_a_hub_that_ends_says_good_bye_so_that_nobody_takes_it_for_dead(site: Site) -> None:
    site.sidecars[0].send(over=0)
    site.hub.finish(2.0)
    assert site.told(1) == [{"bye": True}]


def test_a_hub_of_more_ranks_than_select_can_count_tells_the_first_why_the_last_ended() -> None:
    size, (soft, hard) = 1100, resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * size + 200), hard))
    hub = Hub(size, LIMIT, TOKEN, "127.0.0.1")
    hub.start()
    sidecars: list[Connection] = []
    try:
        for rank in range(size):
            sidecars.append(Connection(socket.create_connection(("127.0.0.1", hub.port))))
            sidecars[-1].send(rank=rank, token=TOKEN)
        wait_until(lambda: set(hub._connections.values()) == set(range(size)), seconds=60.0)
        sidecars[-1].send(over=4)
        assert select.select([sidecars[0]], [], [], 30.0)[0]
        assert next(sidecars[0].receive())["rank"] == size - 1
    finally:
        hub.finish(30.0)
        for each in sidecars:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("guess", ["guess", "wörd", "\ud800"])
def test_who_does_not_know_the_word_is_sent_away_and_garbage_is_nothing(site: Site, guess: str) -> None:
    stranger = site.connect(1, token=guess)
    stranger.send(over=1)
    assert select.select([stranger], [], [], 3.0)[0]
    assert list(stranger.receive()) == []
    assert not stranger.open
    stranger.close()
    site.sidecars[2].send()
    site.sidecars[2]._socket.sendall(b"\xff{]\n[1]\n")
    assert site.told(0, 0.3) == []
    site.sidecars[2].send(over=3)
    assert site.told(0)[0]["rank"] == 2
