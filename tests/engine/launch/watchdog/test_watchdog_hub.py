"""Sidecars of several ranks at their hub: what each reports, and what all are told."""

from __future__ import annotations

import base64
import os
import resource
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_run.contracts.activity import Activity
from megatron_run_engine.launch.watchdog import hub as hub_module
from megatron_run_engine.launch.watchdog.connection import Connection, family_of, join_hub
from megatron_run_engine.launch.watchdog.hub import GRACE, Hub
from megatron_run_engine.launch.watchdog.page import PageWriter
from tests.support.processes import wait_until

LIMIT, SECRET = 5.0, "of this run alone"


class Site:
    """A hub of three ranks, and a connection for the sidecar of each."""

    def __init__(self, folder: Path) -> None:
        self.hub = Hub(3, LIMIT, SECRET, "127.0.0.1")
        self.hub.start()
        self.sidecars = [self.connect(rank) for rank in range(3)]
        self.folder = folder
        wait_until(lambda: set(self.hub._connections.values()) == {0, 1, 2})

    def connect(self, rank: int) -> Connection:
        connection = Connection(socket.create_connection(("127.0.0.1", self.hub.port)))
        assert join_hub(connection, rank, SECRET, 10.0)
        return connection

    def stranger(self) -> Connection:
        """Somebody who has come, and was greeted."""
        return Connection(socket.create_connection(("127.0.0.1", self.hub.port)))

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
        if not wait([self.sidecars[rank].fileno()], seconds):
            return []
        return [dict(message) for message in self.sidecars[rank].receive()]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.hub.finish(2.0)
    for each in site.sidecars:
        each.close()


@pytest.mark.parametrize(
    ("listens", "comes"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("", "127.0.0.1"), ("", "::1")]
)
def test_a_hub_is_reached_by_both_kinds_of_addresses(listens: str, comes: str) -> None:
    try:
        socket.create_server((comes, 0), family=family_of(comes)).close()
    except OSError:
        pytest.skip(f"this machine has no {comes}")
    hub = Hub(1, LIMIT, SECRET, listens)
    hub.start()
    try:
        connection = Connection(socket.create_connection((comes, hub.port)))
        assert join_hub(connection, 0, SECRET, 10.0)
        connection.close()
    finally:
        hub.finish(2.0)


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
    if hard < 2 * size + 200:
        pytest.skip(f"ulimit -Hn is {hard}: two descriptors a rank are more")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * size + 200), hard))
    hub = Hub(size, LIMIT, SECRET, "127.0.0.1")
    hub.start()
    sidecars: list[Connection] = []
    try:
        for rank in range(size):
            sidecars.append(Connection(socket.create_connection(("127.0.0.1", hub.port))))
            assert join_hub(sidecars[-1], rank, SECRET, 30.0)
        wait_until(lambda: set(hub._connections.values()) == set(range(size)), seconds=60.0)
        sidecars[-1].send(over=4)
        assert wait([sidecars[0].fileno()], 30.0)
        assert next(sidecars[0].receive())["rank"] == size - 1
    finally:
        hub.finish(30.0)
        for each in sidecars:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def gone(connection: Connection, seconds: float = 3.0) -> bool:
    """Whether the hub has closed the connection, after what it had said."""
    while connection.open and wait([connection.fileno()], seconds):
        list(connection.receive())
    return not connection.open


@pytest.mark.parametrize("secret", ["", "guess", "wörd", "\ud7ff"])
def test_who_does_not_know_the_secret_is_sent_away_and_ends_nothing(site: Site, secret: str) -> None:
    stranger = site.stranger()
    assert not join_hub(stranger, 1, secret, 3.0)
    stranger.send(over=1)
    assert gone(stranger)
    stranger.close()
    assert site.told(0, 0.3) == []


@pytest.mark.parametrize(
    "line",
    [
        b'{"rank": 1, "token": "of this run alone"}\n',
        b'{"over": 1}\n',
        b'{"rank": true, "proof": 1}\n',
        b'{"rank": 7, "nonce": "", "proof": ""}\n',
        b'{"rank": 1e999}\n',
        b"x" * 5000,
        b"[" * 400 + b"\n{}\n",
    ],
)
def test_what_a_stranger_says_instead_of_a_proof_sends_it_away(site: Site, line: bytes) -> None:
    stranger = site.stranger()
    stranger._socket.sendall(line)
    assert gone(stranger)
    stranger.close()
    assert site.told(0, 0.3) == []


def test_a_proof_that_was_overheard_is_good_for_nothing(site: Site) -> None:
    """The same words in another connection, and the hub's own proof handed back to it."""
    between, ours = site.stranger(), site.stranger()
    (greeting,) = hear(between)
    heard: list[dict[str, Any]] = []
    relay, end = socket.socketpair()
    with relay, end:
        sidecar = threading.Thread(target=join_hub, args=(Connection(end), 1, SECRET, 0.5))
        sidecar.start()
        Connection(relay).send(**greeting)
        heard += hear(Connection(relay))
        sidecar.join()
    (other,) = hear(ours)
    assert other != greeting
    ours.send(**heard[0])
    assert gone(ours)
    between.send(**heard[0])
    (answer,) = hear(between)
    last = site.stranger()
    hear(last)
    last.send(**{**heard[0], **answer})
    assert gone(last)
    for each in (between, ours, last):
        each.close()


def hear(connection: Connection) -> list[dict[str, Any]]:
    assert wait([connection.fileno()], 3.0)
    return [dict(message) for message in connection.receive()]


def test_a_sidecar_does_not_obey_who_only_listens_where_the_hub_should(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        connection = Connection(socket.create_connection(impostor.getsockname()))
        theirs, _ = impostor.accept()
        theirs.sendall(b'{"nonce": "x"}\n{"end": "now", "rank": 0, "grace": 0, "speak": true}\n')
        assert not join_hub(connection, 0, SECRET, 3.0)
        connection.close()
        theirs.close()


def test_garbage_of_a_sidecar_is_nothing(site: Site) -> None:
    site.sidecars[2].send()
    site.sidecars[2]._socket.sendall(b'\xff{]\n[1]\n{"quiet": 1}\n{"quiet": 1, "stopped": 0, "page": 3}\n')
    assert site.told(0, 0.3) == []
    site.sidecars[2].send(over=3)
    assert site.told(0)[0]["rank"] == 2


def test_strangers_are_few_the_oldest_leaves_first_and_the_ranks_are_heard(tmp_path: Path) -> None:
    with mock.patch.object(hub_module, "_STRANGERS", 8):
        site = Site(tmp_path)
    strangers = [site.stranger() for _ in range(40)]
    try:
        assert all(gone(each) for each in strangers[:32])
        wait_until(lambda: len(site.hub._strangers) == 8)
        site.sidecars[0].send(over=4)
        assert site.told(2)[0]["rank"] == 0
    finally:
        site.hub.finish(2.0)
        for each in (*strangers, *site.sidecars):
            each.close()


def test_strangers_who_come_at_once_do_not_hold_up_a_rank() -> None:
    """A connection for which there is no room in the queue is tried again after a second."""
    hub = Hub(3, LIMIT, SECRET, "127.0.0.1")
    strangers = [socket.socket() for _ in range(40)]
    try:
        for each in strangers:  # none of them is taken yet
            each.settimeout(0.8)
            each.connect(("127.0.0.1", hub.port))
    finally:
        hub.start()
        hub.finish(2.0)
        for each in strangers:
            each.close()


def test_who_says_nothing_is_sent_away_after_a_while(tmp_path: Path) -> None:
    with mock.patch.object(hub_module, "_GREETED_WITHIN", 0.3):
        site = Site(tmp_path)
        stranger = site.stranger()
        assert gone(stranger)
        site.hub.finish(2.0)
    for each in (stranger, *site.sidecars):
        each.close()


def test_without_room_for_a_file_strangers_leave_and_the_ranks_are_heard(site: Site) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [socket.socket() for _ in range(40)]
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 5, limits[1]))
        for each in strangers:
            each.connect(("127.0.0.1", site.hub.port))
        site.sidecars[0].send(over=4)
        assert site.told(2)[0]["rank"] == 0
        assert not site.hub.failure
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in strangers:
            each.close()


def test_a_hub_that_fails_says_so_and_ends_nobody(site: Site) -> None:
    with mock.patch.object(hub_module, "judge", side_effect=ArithmeticError("of its own")):
        site.report(1, LIMIT, inside=False)
        assert site.told(0) == [{"bye": True}]
    wait_until(lambda: bool(site.hub.failure))
    assert site.hub.failure == "ArithmeticError: of its own"
