"""What one rank decides for all: the layout that ``run.elastic=plan`` has searched for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode, InputError
from megatron_run.planning import ResolvedRun
from megatron_run_engine.launch.api import _launch_joined
from megatron_run_engine.launch.failures import exit_code
from megatron_run_engine.launch.job import LaunchOptions
from megatron_run_engine.launch.planned import with_planned_sizes
from megatron_run_engine.launch.rendezvous import Outcome, PeerError, Rendezvous
from megatron_run_engine.launch.worker import RankWorker
from megatron_run_engine.runtime.world import World
from tests.engine.launch.meeting import meet


@pytest.fixture
def file(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'rendezvous'}"


def planned(rank: int, asked: list[int], *, fails: bool = False) -> Mapping[str, str]:
    asked.append(rank)
    if fails:
        raise InputError("no layout fits")
    return {"parallel.data": str(rank + 2)}


def test_what_takes_long_to_find_rank_0_decides_for_all_and_once(file: str) -> None:
    asked = list[int]()

    def work(rank: int, rendezvous: Rendezvous) -> list[Mapping[str, str]]:
        found = [rendezvous.decide(lambda: planned(rank, asked)) for _ in range(2)]
        rendezvous.decide_nothing()
        found.append(rendezvous.decide(lambda: planned(rank, asked)))
        return [*found, rendezvous.decide(lambda: planned(rank, asked), "without those that are left out")]

    assert [outcome.values for outcome in meet(file, 3, work)] == [([{"parallel.data": "2"}] * 4,)] * 3
    assert asked == [0, 0]


def test_what_rank_0_cannot_decide_it_says_alone_and_none_waits_for_what_it_does_not_decide(file: str) -> None:
    asked = list[int]()

    def fail(rank: int, rendezvous: Rendezvous) -> Mapping[str, str]:
        return rendezvous.decide(lambda: planned(rank, asked, fails=True))

    failed = [outcome.error for outcome in meet(f"{file}.1", 3, fail)]
    assert [type(error) for error in failed] == [InputError, PeerError, PeerError]
    assert [exit_code(error) for error in failed if error is not None] == [ExitCode.INPUT] * 3

    def differ(rank: int, rendezvous: Rendezvous) -> Mapping[str, str]:
        """The ranks' configurations are not the same: that is found later, by their digests."""
        rendezvous.decide_nothing()
        return rendezvous.decide(lambda: planned(rank, asked)) if rank else {}

    assert [outcome.values for outcome in meet(f"{file}.2", 3, differ)] == [({},)] * 3
    assert asked == [0]


def test_a_run_with_a_planned_layout_is_resolved_with_what_rank_0_has_decided(tmp_path: Path, file: str) -> None:
    """Both ranks of a world, as torchrun starts them: the search and the look at the GPU are rank 0's."""
    asked, gpus, runs = list[int](), list[str](), list[ResolvedRun]()
    request = Request(configs=("preset:tiny",), sets=("run.elastic=plan", f"run.folder={tmp_path / 'run'}"))

    class Planner:
        @staticmethod
        def best_layout(_: Request, there: int, gpu: str) -> Mapping[str, str]:
            asked.append(there)
            gpus.append(gpu)
            return {"parallel.pipeline": "1", "parallel.data": "2", "schedule": "gpipe"}

    def agreed(rendezvous: Rendezvous, _: object, resolved: Outcome[ResolvedRun]) -> ResolvedRun:
        runs.append(rendezvous.agree("resolve", resolved).value)
        raise PeerError(0, 0)  # a rank goes no further here

    def join(resolve_run: Any, world: World, options: LaunchOptions) -> None:
        worker = RankWorker(resolve_run, world, options)
        with pytest.raises(PeerError):
            worker._train()
        os.close(worker._terminal)

    def work(rank: int) -> None:
        world = World(rank, 2, rank, 2, init_method=file, launcher="slurm")
        _launch_joined(request, world, LaunchOptions())

    with (
        mock.patch("megatron_run_engine.launch.planned.import_module", return_value=Planner),
        mock.patch("megatron_run_engine.launch.planned._gpu", return_value="H100"),
        mock.patch("megatron_run_engine.launch.worker.agree_on_run", agreed),
        mock.patch("megatron_run_engine.launch.api._join", join),
        ThreadPoolExecutor(2) as threads,
    ):
        list(threads.map(work, range(2)))
    assert [run.sizes.world for run in runs] == [2, 2]
    assert (asked, gpus) == ([2], ["H100"])


def test_a_layout_is_searched_for_anew_and_not_within_the_last_one() -> None:
    seen = list[Request]()

    class Planner:
        @staticmethod
        def best_layout(request: Request, most: int, gpu: str) -> Mapping[str, str]:
            seen.append(request)
            return {"parallel.data": str(most)}

    request = Request(sets=("run.elastic=plan",), there=3, planned={"parallel.tensor": "2", "parallel.data": "2"})
    with mock.patch("megatron_run_engine.launch.planned.import_module", return_value=Planner):
        assert with_planned_sizes(request).planned == {"parallel.data": "3"}
    assert [each.planned for each in seen] == [{}]
