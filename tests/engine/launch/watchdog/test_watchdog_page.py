"""What a rank writes on its page is what the watchdog reads, at a price that the training loop does not feel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from megatron_run.contracts.activity import Activity, Exchange
from megatron_run.contracts.schedule import Action
from megatron_run_engine.launch.watchdog.page import Entered, Page, PageWriter


@pytest.fixture
def activity() -> Activity:
    activity = Activity()
    activity.members.update(world=tuple(range(8)), data=(1, 3, 5, 7), odd=(0, 1, 5))
    return activity


@pytest.fixture
def path(tmp_path: Path, activity: Activity) -> Iterator[Path]:
    path = tmp_path / "page-1"
    with closing(PageWriter(path, activity)):
        yield path


def read(path: Path) -> Page:
    page = Page.read(path)
    assert page is not None
    return page


def test_a_page_says_from_the_beginning_whose_it_is(path: Path) -> None:
    page = read(path)
    assert (page.process, page.step, page.place, page.changes) == (os.getpid(), 0, "start", 1)


def test_each_change_is_counted_and_read_back(path: Path, activity: Activity) -> None:
    activity.step(12)
    activity.enter("forward", Action("F", 1, 0))
    activity.enter("backward", Action("B", 1, 0))
    page = read(path)
    assert (page.changes, Page.changes_at(path), page.place) == (3, 3, "backward B1.0 of step 12")
    assert (page.peer, page.inside) == (None, None)


def test_the_steps_that_were_done_are_counted_from_where_the_rank_began(path: Path, activity: Activity) -> None:
    for step in (40, 41, 42):
        activity.step(step)
        activity.enter("forward")
        activity.enter("backward")
    assert (read(path).step, read(path).done) == (42, 2)


@pytest.mark.parametrize("peer", [0, 5])
def test_a_message_names_who_is_at_its_other_end(peer: int, path: Path, activity: Activity) -> None:
    activity.enter("receive", Exchange("the gradient of microbatch 0", peer))
    page = read(path)
    assert (page.peer, page.place) == (peer, "receive the gradient of microbatch 0")


def test_a_collective_is_read_with_its_number_its_ranks_and_the_phase_around_it(path: Path, activity: Activity) -> None:
    activity.enter("optimizer")
    with activity.collective("all-gather", "data", 640):
        page = read(path)
        assert page.inside == ("data", 1)
        assert page.entered == {"data": Entered(1, 640, "all-gather")}
        assert page.members == {"data": range(1, 8, 2)}
        assert page.place == "optimizer"
    with activity.collective("broadcast", "world", 1):
        pass
    page = read(path)
    assert page.inside is None
    assert page.entered == {"data": Entered(1, 640, "all-gather"), "world": Entered(1, 1, "broadcast")}
    assert page.members == {"data": range(1, 8, 2), "world": range(8)}


def test_waiting_for_an_earlier_collective_leaves_the_last_one_that_was_entered(path: Path, activity: Activity) -> None:
    first, second = (activity.collective("all-reduce", "data", size) for size in (3, 4))
    for begun in (first, second):
        with begun:
            pass
    with first:
        page = read(path)
    assert (page.inside, page.entered["data"]) == (("data", 1), Entered(2, 4, "all-reduce"))


def test_ranks_that_are_not_evenly_spaced_stay_unknown(path: Path, activity: Activity) -> None:
    with activity.collective("all-reduce", "odd", 3):
        assert read(path).members == {}


def test_more_scopes_and_longer_texts_than_fit_are_cut_and_harm_nothing(path: Path, activity: Activity) -> None:
    for number in range(20):
        with activity.collective("an operation with a very long name", f"a scope with a long name {number}", 2**40):
            page = read(path)
    assert len(page.entered) <= 16
    activity.enter("forward", "x" * 1000)
    assert read(path).detail == "x" * 136


def test_what_is_no_page_is_none(tmp_path: Path) -> None:
    for content in (b"", b"\0" * 8192, b"x" * 100):
        (tmp_path / "p").write_bytes(content)
        assert Page.read(tmp_path / "p") is None
    assert Page.read(tmp_path / "absent") is None
    assert Page.changes_at(tmp_path / "absent") == 0
