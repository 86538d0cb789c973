"""Ranks that compare notes; each is a thread with its own place in the world."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from torch._C._distributed_c10d import TCPStore

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode, InputError, PluginError, RankLostError
from megatron_run.files.latest_run import point_latest_at
from megatron_run.planning import ResolvedRun, resolve
from megatron_run_engine.launch import rendezvous as rendezvous_module
from megatron_run_engine.launch.rendezvous import (
    Outcome,
    PeerError,
    Rendezvous,
    agree_on_run,
    attempt,
    check_digests,
    check_gpus,
)
from megatron_run_engine.runtime.world import World
from tests.engine.launch.meeting import meet
from tests.support.commands import free_port

T = TypeVar("T")


@pytest.fixture(scope="session", autouse=True)  # before what a module leaves behind is counted
def _first_server() -> None:
    """torch's first server opens two descriptors that stay as long as the process."""
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'rendezvous'}"


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_rank_0_gets_everybodys_note_by_rank_and_the_others_get_its(file: str, kind: str) -> None:
    place = file if kind == "file" else f"tcp://127.0.0.1:{free_port()}"

    def work(rank: int, rendezvous: Rendezvous) -> list[tuple[list[int], int]]:
        notes = []
        for phase in ("first", "second"):
            agreement = rendezvous.agree(phase, Outcome((rank * 10,)), lambda value: {"value": value + 1})
            assert agreement.value == rank * 10
            notes.append(([note["value"] for note in agreement.notes], agreement.first["value"]))
        rendezvous.agree("end", Outcome((None,)))  # the store lives in rank 0: nobody leaves early
        time.sleep(0.2)
        return notes

    others: tuple[object] = ([([], 1)] * 2,)
    assert [outcome.values for outcome in meet(place, 3, work)] == [([([1, 11, 21], 1)] * 2,), others, others]


@pytest.mark.parametrize(
    ("missed", "speakers"),
    [([1, 2, 3], [2, 2, 2]), ([1, None], [1, 1]), ([1, 0], [1, 0]), ([None, None], [0, 1])],
    ids=["the last is silent", "one knows", "they miss each other", "neither knows"],
)
def test_the_rank_speaks_that_knows_the_cause(file: str, missed: list[int | None], speakers: list[int]) -> None:
    found = meet(file, len(missed), lambda rank, rendezvous: rendezvous.find_cause(f"word of {rank}", missed[rank]))
    assert [outcome.values[0] for outcome in found] == [(speaker, f"word of {speaker}") for speaker in speakers]


def test_a_table_that_one_rank_keeps_another_recalls_by_its_name(file: str) -> None:
    def work(rank: int, rendezvous: Rendezvous) -> tuple[dict[str, str], ...]:
        agreement = rendezvous.agree(
            "phase", Outcome((rank,)), lambda _: {"name": rendezvous.keep({"odd": str(rank % 2)})}
        )
        return tuple(rendezvous.recall(note["name"]) for note in agreement.notes)

    assert meet(file, 3, work)[0].values == (({"odd": "0"}, {"odd": "1"}, {"odd": "0"}),)


@pytest.mark.parametrize("ranks", [4, 16])
def test_a_rank_but_the_first_reads_one_key_of_a_phase_however_many_there_are(
    file: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[list[str]] = []

    def wait(rendezvous: Rendezvous, phase: str, keys: list[str], timeout: float) -> None:
        if rendezvous._world.rank > 0:
            waited.append(keys)
        rendezvous._store.wait(keys, timedelta(seconds=timeout))

    monkeypatch.setattr(Rendezvous, "_wait", wait)
    meet(file, ranks, lambda rank, rendezvous: rendezvous.agree("phase", Outcome((rank,))))
    assert waited == [["phase/verdict"]] * (ranks - 1)


@pytest.mark.parametrize("ranks", [3, 12])
def test_a_look_for_ranks_that_come_is_four_calls_however_many_there_are(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    calls: list[str] = []

    class Counted:
        """The store of rank 0, which is the only one that looks."""

        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(self._store, name)

    open_store = rendezvous_module._open_store
    monkeypatch.setattr(
        rendezvous_module,
        "_open_store",
        lambda world, timeout: open_store(world, timeout) if world.rank else Counted(open_store(world, timeout)),
    )
    monkeypatch.setattr(rendezvous_module, "PrefixStore", lambda start, store: start)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(rendezvous_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    starts = meet(f"tcp://127.0.0.1:{agent.port}", ranks, lambda rank, rendezvous: rendezvous._store, restart=0)
    assert len({str(outcome.values[0]) for outcome in starts}) == 1
    assert {*calls} == {"check", "get", "multi_set"}
    assert len(calls) <= 4 * len(looks) + 1


@pytest.mark.parametrize("counts", [(0, 1), (0, 0)], ids=["counted", "uncounted"])
def test_a_world_that_starts_again_does_not_read_what_the_failed_one_left(counts: tuple[int, int]) -> None:
    """torchrun counts no start after which more hosts take part. The second world has another rank."""
    port = free_port()
    agent = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)  # torchrun's
    for start, restart in enumerate(counts):

        def work(rank: int, rendezvous: Rendezvous, start: int = start) -> object:
            time.sleep(0 if rank else 0.3)  # what is left would be read before rank 0 writes
            return rendezvous.agree("phase", Outcome((rank,)), lambda _: {"start": start}).first["start"]

        outcomes = meet(f"tcp://127.0.0.1:{port}", 2 + start, work, restart=restart)
        assert [outcome.values for outcome in outcomes] == [(start,)] * (2 + start)
    assert agent.num_keys() > 0


def test_spares_wait_for_the_end_of_those_that_train_and_end_with_its_code() -> None:
    port = free_port()
    agent = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
    alive: list[int] = []

    def work(rank: int, rendezvous: Rendezvous) -> object:
        if rank:
            return rendezvous.stand_by(lambda: alive.append(rank))
        time.sleep(0.3)
        rendezvous.release_spares(ExitCode.RANK_LOST)
        rendezvous.release_spares(ExitCode.DONE)  # the first that says it is right
        return None

    outcomes = meet(f"tcp://127.0.0.1:{port}", 3, work, restart=0)
    assert [outcome.values for outcome in outcomes] == [(None,), (ExitCode.RANK_LOST,), (ExitCode.RANK_LOST,)]
    assert {1, 2} <= {*alive}
    assert agent.num_keys() > 0


def test_a_world_of_one_meets_itself() -> None:
    assert Rendezvous(World(), 1.0).agree("phase", Outcome((7,))).value == 7


def test_the_lowest_failing_rank_speaks_and_all_end_with_its_code(file: str) -> None:
    def work(rank: int, rendezvous: Rendezvous) -> object:
        problem = PluginError(f"rank {rank} has no plugin") if rank else None
        return rendezvous.agree("resolve", Outcome(() if problem else (rank,), problem))

    errors = [outcome.error for outcome in meet(file, 3, work)]
    assert [type(error) for error in errors] == [PeerError, PluginError, PeerError]
    assert [error.exit_code for error in errors if isinstance(error, PluginError | PeerError)] == [3, 3, 3]
    assert str(errors[1]) == "rank 1 has no plugin"


def test_a_rank_that_never_joins_is_named_once(file: str) -> None:
    def work(rank: int, rendezvous: Rendezvous) -> object:
        return None if rank == 1 else rendezvous.agree("resolve", Outcome((rank,)))

    start = time.monotonic()
    errors = [outcome.error for outcome in meet(file, 3, work, timeout=1.0)]
    assert time.monotonic() - start < 6
    assert isinstance(errors[0], RankLostError)
    assert str(errors[0]).startswith("rank 1 of 3 did not join within 1 s")
    assert isinstance(errors[2], PeerError)
    assert errors[2].exit_code == 4


def test_when_rank_0_never_joins_the_next_one_says_so(file: str) -> None:
    def work(rank: int, rendezvous: Rendezvous) -> object:
        return None if rank == 0 else rendezvous.agree("resolve", Outcome((rank,)))

    errors = [outcome.error for outcome in meet(file, 3, work, timeout=0.5)]
    assert str(errors[1]).startswith("rank 0 of 3 did not join")
    assert isinstance(errors[2], PeerError)


def test_a_rendezvous_where_nobody_listens_is_named() -> None:
    world = World(rank=1, size=2, init_method=f"tcp://127.0.0.1:{free_port()}")
    with pytest.raises(RankLostError, match=r"rank 1 cannot reach the rendezvous at tcp://127\.0\.0\.1"):
        Rendezvous(world, 1.0)


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RankLostError) as refused:
            Rendezvous(World(rank=0, size=2, init_method=place, serves_store=True), 1.0)
    line = str(refused.value)
    assert line.startswith(f"rank 0 cannot open the rendezvous at {place}: ")
    assert "\n" not in line
    assert "check that the first host is up and the port is free and open" in line


def test_the_rank_that_keeps_the_store_leaves_last() -> None:
    def work(rank: int, rendezvous: Rendezvous) -> float:
        rendezvous.agree("phase", Outcome((rank,)))
        time.sleep(0.5 * rank)
        rendezvous.leave()
        return time.monotonic()

    first, second = (outcome.values[0] for outcome in meet(f"tcp://127.0.0.1:{free_port()}", 2, work))
    assert first > second - 0.2


def test_a_rank_that_is_gone_does_not_hold_up_the_store() -> None:
    start = time.monotonic()
    meet(f"tcp://127.0.0.1:{free_port()}", 2, lambda rank, rendezvous: rendezvous.leave() if rank == 0 else None)
    assert time.monotonic() - start < 6


def test_an_input_error_keeps_its_words_through_a_rendezvous(file: str) -> None:
    def work(rank: int, rendezvous: Rendezvous) -> object:
        return rendezvous.agree("resolve", Outcome((), InputError("no", why="because", fix="do")))

    assert str(meet(file, 2, work)[0].error) == "no: because; do"


TABLES = {
    "first": {"schedule": "1f1b", "same": "1", "code": "0" * 64},
    "second": {"schedule": "1f1b", "same": "1", "code": "f" * 64},
    "third": {"schedule": "mine", "same": "1"},
    "bare": {"schedule": "1f1b", "same": "1"},
}


def note(host: str, digest: str = "first", gpu: str = "") -> dict[str, Any]:
    return {"host": host, "digest": digest, "gpu": gpu}


def test_ranks_that_resolved_the_same_run_agree_and_no_table_is_read() -> None:
    def recall(name: str) -> dict[str, str]:
        raise AssertionError(name)

    check_digests([note("a"), note("b")], recall)
    check_digests([], recall)


def test_what_only_some_ranks_have_is_a_difference() -> None:
    with pytest.raises(PluginError, match=r"code: 000000000000 on rank 0 \(a\), nothing on rank 1 \(b\)"):
        check_digests([note("a"), note("b", "bare")], TABLES.__getitem__)


def test_a_difference_is_a_table_of_ranks_and_hosts() -> None:
    with pytest.raises(PluginError) as caught:
        check_digests([note("a"), note("a", "second"), note("b", "third")], TABLES.__getitem__)
    head, *table = str(caught.value).splitlines()
    assert head.startswith("the ranks do not run the same thing: 2 entries differ; install the same versions")
    assert table == [
        "  code: 000000000000 on rank 0 (a), ffffffffffff on rank 1 (a), nothing on rank 2 (b)",
        "  schedule: 1f1b on rank 0 (a), 1 (a), mine on rank 2 (b)",
    ]


def test_ranks_on_the_cpu_or_with_a_gpu_each_agree() -> None:
    check_gpus([note("a"), note("a")])
    check_gpus([note("a", gpu="x"), note("a", gpu="y")])


def test_two_ranks_with_the_same_gpu_are_named() -> None:
    with pytest.raises(InputError, match=r"rank 1, 2 would train on the same GPU of b: .* or set run\.device=cpu"):
        check_gpus([note("a", gpu="x"), note("b", gpu="y"), note("b", gpu="y")])


def test_ranks_that_found_other_latest_runs_take_that_of_rank_0_and_keep_it_when_they_are_started_again(
    tmp_path: Path,
) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = [f"2026010{number}-000000-aaaa" for number in range(4)]
    request = Request(configs=("preset:tiny",), sets=(f"run.init_from={tmp_path / 'latest'}",))

    def resolve_run(latest: Mapping[str, str], _: object = None) -> ResolvedRun:
        return resolve(replace(request, latest=latest))

    def start(restart: int) -> list[list[str]]:
        turn = Event()

        def work(rank: int, rendezvous: Rendezvous) -> list[str]:
            assert not rank or turn.wait(20)
            point_latest_at(tmp_path / names[2 * restart + rank])  # a run that has begun between their looks
            resolved = attempt(lambda: resolve_run(rendezvous.remembered() if restart else {}))
            turn.set()
            runs = [resolved.values[0], agree_on_run(rendezvous, resolve_run, resolved)]
            return [run.config.run.init_from.name for run in runs if run.config.run.init_from]

        return [outcome.values[0] for outcome in meet(f"tcp://127.0.0.1:{agent.port}", 2, work, restart=restart)]

    assert start(0) == [[names[0], names[0]], [names[1], names[0]]]
    assert start(1) == [[names[0], names[0]]] * 2
