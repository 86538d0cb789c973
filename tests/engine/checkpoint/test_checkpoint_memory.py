"""Steps in the memory of hosts: what is saved survives any host, and no copy that is not what it was is ever taken."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_run.contracts.activity import Activity
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.exchange import Blocks
from megatron_run_engine.checkpoint.files import MemoryFiles, NewFile
from megatron_run_engine.checkpoint.hosts import Hosts, Transfer
from megatron_run_engine.checkpoint.manifest import MANIFEST
from megatron_run_engine.checkpoint.memory_home import Held, MemoryHome
from megatron_run_engine.checkpoint.memory_saver import MemorySaver
from megatron_run_engine.checkpoint.survivors import Survivors, choose
from tests.support.memory_hosts import RUN, Cluster
from tests.support.saved_steps import about, dealt, random_state, same_state, shapes_of


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Two hosts of two ranks, whose memory holds steps 10 and 20."""
    cluster = Cluster(tmp_path)
    for step in (10, 20):
        sizes = cluster.save(step, random_state(step))
        assert all(isinstance(size, int) for size in sizes), sizes
    return cluster


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 1), (2, 2), (2, 1), (1, 3), (2, 1, 3)])
def test_what_was_saved_is_found_whichever_host_is_lost(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    lost: list[int | None] = [None, *range(len(sizes))] if len(sizes) > 1 else [None]
    for host in lost:
        cluster = Cluster(tmp_path / str(host), sizes)
        cluster.folder.mkdir()
        state = random_state(7)
        cluster.save(7, state)
        if host is not None:
            shutil.rmtree(cluster.home(host).path.parent)
        step, found = cluster.found()
        assert (step, same_state(found, state)) == (7, True)
    assert not cluster.said


def test_a_host_keeps_its_own_files_and_those_of_one_neighbour(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, (1, 1, 1))
    cluster.save(5, random_state(5))
    for host in range(3):
        names = {path.name for path in cluster.home(host).steps.folder(5).iterdir()}
        assert names == {MANIFEST, *(f"rank-{rank:05d}.safetensors" for rank in (host, (host - 1) % 3))}
    assert len({cluster.path(host, 5, MANIFEST).read_bytes() for host in range(3)}) == 1


def test_the_two_newest_steps_stay_and_room_is_made_before_a_third_is_written(cluster: Cluster) -> None:
    during: list[list[int]] = []
    begin = MemoryHome.begin

    def look(home: MemoryHome, step: int) -> None:
        begin(home, step)
        during.append(home.steps.steps())

    with mock.patch.object(MemoryHome, "begin", look):
        cluster.save(30, random_state(30))
    assert during == [[20], [20]]
    assert [cluster.home(host).steps.steps() for host in range(2)] == [[20, 30]] * 2


def test_only_what_ranks_read_is_sent(tmp_path: Path) -> None:
    """Four hosts in a ring: a lost one gets from its neighbours what its rank saved, and nothing else."""
    cluster = Cluster(tmp_path, (1, 1, 1, 1))
    cluster.save(5, random_state(5))
    shutil.rmtree(cluster.home(2).path.parent)
    found = cluster.find(read=lambda rank, _: [f"rank-{rank:05d}.safetensors"])
    assert all(each.step == 5 for each in found)
    assert {path.name for path in cluster.home(2).steps.folder(5).iterdir()} == {MANIFEST, "rank-00002.safetensors"}


def test_both_copies_lost_is_the_older_step_or_none_and_a_line(cluster: Cluster) -> None:
    for host in range(2):
        cluster.path(host, 20, 1).unlink()
    assert cluster.found()[0] == 10
    assert cluster.said == ["step 20 in memory is not whole: 1 of its 4 files are on no host"]
    assert cluster.find(at_least=11) == [None] * 4, "the disk has a newer one"
    for host in range(2):
        shutil.rmtree(cluster.home(host).path)
    assert cluster.find() == [None] * 4


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


#: By what is done to a file, the words of the line that says so.
LIES: Mapping[Callable[[Path], None], str] = {
    flip: "is damaged: its XXH3 is not that of the manifest",
    cut: "is damaged: it has",
    link: "cannot be read: it is a symbolic link",
    folder: "cannot be read: ",
}


@pytest.mark.parametrize(("lie", "host"), [*product(LIES, range(2))])
def test_a_copy_that_lies_is_named_and_the_other_one_taken(
    cluster: Cluster, lie: Callable[[Path], None], host: int
) -> None:
    lie(cluster.path(host, 20, 2))
    step, found = cluster.found()
    assert (step, same_state(found, random_state(20))) == (20, True)
    (line,) = cluster.said
    assert str(cluster.path(host, 20, 2)) in line
    assert LIES[lie] in line


def test_a_copy_that_lies_and_cannot_be_removed_is_not_tried_for_ever(cluster: Cluster) -> None:
    flip(cluster.path(1, 20, 2))

    def find(ranks: Any, home: MemoryHome, hosts: Hosts, postman: Any) -> object:
        survivors = Survivors(home, hosts, ranks, postman, cluster.said.append)
        return survivors.find(1, lambda manifest: manifest.files)

    with mock.patch.object(MemoryFiles, "unlink", side_effect=OSError(1, "Operation not permitted")):
        found = cluster.on_ranks(find)
    assert all("rank-00002.safetensors is not what it was, and cannot be removed" in str(each) for each in found)


@pytest.mark.parametrize("lie", [*LIES])
def test_where_both_copies_lie_the_older_step_is_taken(cluster: Cluster, lie: Callable[[Path], None]) -> None:
    for host in range(2):
        lie(cluster.path(host, 20, 2))
    step, found = cluster.found()
    assert (step, same_state(found, random_state(10))) == (10, True)
    assert len(cluster.said) == 3
    assert cluster.said[-1].startswith("step 20 in memory is not whole")


def test_a_copy_that_was_flipped_and_is_sent_is_found_by_who_gets_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, (1, 1, 1))
    for step in (10, 20):
        cluster.save(step, random_state(step))
    flip(cluster.path(1, 20, 0))  # the neighbour's copy of what rank 0 saved
    shutil.rmtree(cluster.home(0).path.parent)
    found = cluster.find(read=lambda rank, _: [f"rank-{rank:05d}.safetensors"])  # its holder reads it not
    assert {each.step for each in found} == {10}
    damaged, not_whole = cluster.said
    assert damaged.startswith("in memory rank-00000.safetensors of rank 1 is damaged: its XXH3")
    assert not_whole == "step 20 in memory is not whole: 1 of its 3 files are on no host"


@pytest.mark.parametrize("what", ["foreign", "garbage", "another step"])
def test_a_manifest_that_is_not_this_runs_is_refused_and_the_other_hosts_is_used(cluster: Cluster, what: str) -> None:
    path = cluster.path(1, 20, MANIFEST)
    if what == "foreign":
        other = Cluster(cluster.folder / "other", run="f" * 32)
        other.folder.mkdir()
        other.save(20, random_state(20))
        shutil.copy(other.path(1, 20, MANIFEST), path)
    elif what == "another step":
        shutil.copy(cluster.path(1, 10, MANIFEST), path)
    else:
        path.write_text("garbage")
    step, found = cluster.found()
    assert (step, same_state(found, random_state(20))) == (20, True)
    (line,) = cluster.said
    assert "of another run" in line or "is damaged" in line or "is not what its name says" in line


def test_a_link_in_the_place_of_a_step_is_not_followed(cluster: Cluster) -> None:
    moved = cluster.folder / "moved"
    cluster.home(0).steps.folder(20).rename(moved)
    cluster.home(0).steps.folder(20).symlink_to(moved)
    assert cluster.found()[0] == 20
    assert not cluster.home(0).steps.folder(20).is_symlink()
    assert len(list(moved.iterdir())) == 5, "what it led to is left alone"


def test_hosts_with_different_saves_of_one_step_use_the_one_that_is_whole(cluster: Cluster) -> None:
    """A host that was lost and came back holds what an earlier attempt saved."""
    other = Cluster(cluster.folder / "other")
    other.folder.mkdir()
    other.save(20, random_state(99), time="later")
    shutil.rmtree(cluster.home(1).path)
    shutil.copytree(other.home(1).path, cluster.home(1).path)
    for rank in range(2):
        cluster.path(1, 20, rank).unlink()  # so that theirs is not whole
    step, found = cluster.found()
    assert (step, same_state(found, random_state(20))) == (20, True)


def test_another_layout_reads_what_four_ranks_saved(cluster: Cluster) -> None:
    fewer = Cluster(cluster.folder, (1, 1))
    step, found = fewer.found()
    assert (step, same_state(found, random_state(20))) == (20, True)
    more = Cluster(cluster.folder, (3, 2))
    assert more.found()[0] == 20


class Full(MemoryFiles):
    """A file system that takes so many new files."""

    def __init__(self, left: int = 10**9) -> None:
        self.left = left

    def create(self, path: Path) -> NewFile:
        self.left -= 1
        if self.left < 0:
            raise OSError(28, os.strerror(28), str(path))
        return super().create(path)


@pytest.mark.parametrize("left", range(5))
def test_memory_that_is_full_leaves_the_steps_before_and_goes_on_when_there_is_room(
    cluster: Cluster, left: int
) -> None:
    """Own shards, copies and the manifest are five files of a host."""
    full = Full()
    cluster.files = {1: full}
    full.left = left
    failed = cluster.save(30, random_state(30))
    assert all(isinstance(each, CheckpointError) for each in failed)
    assert "No space left on device" in str(failed[0])
    assert not list(cluster.home(1).path.glob(".tmp*"))
    full.left = 10**9
    cluster.files = {}
    assert cluster.found()[0] in ((20, 30) if left == 4 else (20,)), "the other host may have committed"
    cluster.files = {1: full}
    assert all(isinstance(each, int) for each in cluster.save(40, random_state(40)))
    assert cluster.found()[0] == 40


@pytest.mark.parametrize("left", range(5))
def test_a_host_without_room_for_what_it_lacks_takes_the_older_step_that_it_has(cluster: Cluster, left: int) -> None:
    """A manifest and four files are to come."""
    shutil.rmtree(cluster.home(0).steps.folder(20))
    cluster.files = {0: Full(left)}
    step, found = cluster.found()
    assert (step, same_state(found, random_state(10))) == (10, True)
    (line,) = cluster.said
    assert line.startswith("step 20 in memory is not used: a host has no room for what it lacks of it: rank ")
    assert "No space left on device: " in line
    assert not [path for path in cluster.home(0).path.rglob("*") if path.is_file() and "step20" in str(path.parent)][1:]
    assert not list(cluster.home(0).path.glob(".tmp*"))
    cluster.files = {}
    assert cluster.found()[0] == 20, "once there is room"


def refused_to(number: int) -> Any:
    """Memory for blocks, which the rank that asks as the so-many-th does not get."""
    turns = count(1)

    def blocks() -> Blocks:
        if next(turns) == number:
            raise MemoryError
        return Blocks()

    return blocks


@pytest.mark.parametrize("number", [1, 4])
def test_a_rank_without_memory_for_a_block_keeps_none_waiting_and_the_older_step_is_taken(
    cluster: Cluster, number: int
) -> None:
    shutil.rmtree(cluster.home(0).steps.folder(20))
    with mock.patch("megatron_run_engine.checkpoint.survivors.Blocks", refused_to(number)):
        assert cluster.found()[0] == 10
    (line,) = cluster.said
    assert line.endswith(": Cannot allocate memory")


@pytest.mark.parametrize("number", [1, 4])
def test_a_rank_without_memory_for_a_block_leaves_the_save_out_as_full_memory_does(
    cluster: Cluster, number: int
) -> None:
    with mock.patch("megatron_run_engine.checkpoint.memory_saver.Blocks", refused_to(number)):
        failed = cluster.save(30, random_state(30))
    assert {type(each) for each in failed} == {CheckpointError}
    assert "step 30 could not be saved in memory: Cannot allocate memory" in str(failed[0])
    assert all(isinstance(each, int) for each in cluster.save(40, random_state(40)))


def test_a_rank_that_fails_before_it_sends_leaves_no_neighbour_waiting(cluster: Cluster) -> None:
    state = random_state(30)
    hands = dealt(30, state, 4)

    def fail(_: int, phase: str, __: object) -> None:
        if phase == "save-neighbour":
            raise MemoryError

    def save(ranks: Any, home: MemoryHome, hosts: Hosts, postman: Any) -> int:
        activity = Activity()
        activity.listeners += [fail] * (ranks.rank == 1)
        saver = MemorySaver(home, hosts, ranks, postman, activity)
        return saver.save(about(30, run=RUN), hands[ranks.rank], shapes_of(state))

    assert [type(each) for each in cluster.on_ranks(save)] == [CheckpointError] * 4
    assert cluster.found()[0] == 20


def test_a_host_that_commits_alone_has_saved_the_step_for_all(cluster: Cluster) -> None:
    """Ranks that die between the commits of two hosts: whichever host has committed holds, of two, every file."""
    shutil.rmtree(cluster.home(1).steps.folder(20))
    step, found = cluster.found()
    assert (step, same_state(found, random_state(20))) == (20, True)


def test_a_copy_goes_to_the_next_host_whose_ranks_share_the_work() -> None:
    hosts = Hosts.seeing(["x", "y", "x", "y", "x", "z"])
    assert hosts.ranks == ((0, 2, 4), (1, 3), (5,))
    assert [hosts.neighbour(rank) for rank in range(6)] == [1, 5, 3, 5, 1, 0]
    assert [rank for rank in range(6) if hosts.leads(rank)] == [0, 1, 5]
    assert hosts.share(4, "abcdefg") == ["c", "f"]
    assert Hosts.seeing(["x"] * 3).neighbour(1) is None
    sent = hosts.fetches({"a": 1, "b": 2, "c": 3}, [{"a"}, {"a", "b", "c"}, set()], [{"a", "c"}, {"a"}, {"b"}])
    assert sent == [Transfer("b", 2, 5, 1), Transfer("c", 3, 2, 3)]


def test_the_newest_step_that_is_whole_over_the_hosts_is_chosen() -> None:
    one = [Held(4, "x", 9, 2, ("a", "b")), Held(6, "y", 9, 3, ("a", "b"))]
    other = [Held(4, "x", 9, 2, ()), Held(6, "y", 9, 3, ("b",)), Held(6, "z", 7, 1, ("c",))]
    chosen, lines = choose([one, other], 1)
    assert chosen == (6, 1, 7, [(), ("c",)])
    chosen, lines = choose([one, other[:2]], 1)
    assert chosen == (4, 0, 9, [("a", "b"), ()])
    assert lines == ["step 6 in memory is not whole: 1 of its 3 files are on no host"]
    assert choose([one, other], 7) == (None, [])
