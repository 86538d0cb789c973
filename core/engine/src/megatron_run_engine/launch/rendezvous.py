"""Ranks meet at a key-value store, and agree on what they run before they build anything."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Generic, TypeVar

# torch.distributed has these names too, but does not declare them as its own.
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from megatron_run.errors import ExitCode, InputError, PluginError, RankLostError, RunError
from megatron_run_engine.launch.failures import exit_code
from megatron_run_engine.runtime.world import World

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.launch.planned import Decide

T = TypeVar("T")

#: Makes the run of a rank from what each ``runs/latest`` stands for, as :class:`Request` has it; empty: read it. It has
#: rank 0 decide what all would take long to find.
ResolveRun = Callable[[Mapping[str, str], "Decide"], "ResolvedRun"]
#: Where a store keeps that for later starts, and the words of ranks that came, of all starts.
_LATEST, _CAME = "megatron-run/latest", "came"

#: Seconds that ranks wait longer than rank 0, so that it is rank 0 that names a missing rank.
_SLACK = 2.0
#: Seconds between two looks of rank 0 for ranks of this start, and of a spare for the end of the others.
_LOOK = 0.05
_OVER, _DECIDED = "over", "decided"
_SHA256 = re.compile("[0-9a-f]{64}")


class PeerError(RunError):
    """Another rank has reported the failure: this rank ends with the same code and prints nothing."""

    def __init__(self, rank: int, code: int) -> None:
        super().__init__(f"rank {rank} failed")
        self.exit_code = ExitCode(code)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The result of a piece of work, or its error, kept until the other ranks know."""

    values: tuple[T, ...]
    error: Exception | SystemExit | None = None


def attempt(work: Callable[[], T]) -> Outcome[T]:
    """Do ``work``, and keep what it raises."""
    try:
        return Outcome((work(),))
    except (Exception, SystemExit) as error:
        return Outcome((), error)


@dataclass(frozen=True)
class Agreement(Generic[T]):
    """A phase that succeeded on every rank: what this rank's work returned, and the notes on it.

    ``first`` is rank 0's note, ``notes`` those of all ranks, which only rank 0 has.
    """

    value: T
    first: Mapping[str, Any]
    notes: tuple[Mapping[str, Any], ...] = ()


class Rendezvous:
    """The ranks of one world around a key-value store, each phase under its own keys, in which they wait ``timeout`` s.

    Rank 0 reads the notes of all ranks, once; the others read one verdict of fixed size. So a phase costs the store
    time and bytes proportional to the number of ranks, and not to its square.
    """

    def __init__(self, world: World, timeout: float) -> None:
        self._world = world
        self.timeout = timeout
        # torchrun's agent keeps its store over restarts, with the keys of the ranks that failed: each start has a
        # prefix of its own.
        self._all_starts = _open_store(world, timeout)
        start = self._meet() if world.launcher == "torchrun" and world.size > 1 else "start"
        self._store = PrefixStore(start, self._all_starts)

    def _meet(self) -> str:
        """The name of this start, on which its ranks agree although keys of others are there.

        torchrun's count of restarts is no such name: each agent counts its own, and none counts those after which more
        hosts take part. So each rank adds a fresh word to a list, and waits for an answer to it; rank 0 answers every
        word until all ranks have heard theirs. Words of earlier starts stay in the list, and nobody waits for them. A
        look of rank 0 is four calls of the store, however many ranks there are.
        """
        rank, size, store = self._world.rank, self._world.size, self._all_starts
        fresh = token_hex(8)
        if rank:
            store.append(_CAME, f"{rank}:{fresh} ")  # type: ignore[attr-defined]  # missing in torch's stub
            self._await(store, [f"start/{fresh}"], self.timeout + _SLACK)
            start = store.get(f"start/{fresh}").decode()
            store.set(f"{start}/met/{rank}", "")
            return start
        start, deadline = f"start-{fresh}", time.monotonic() + self.timeout
        met = {each: f"{start}/met/{each}" for each in range(1, size)}
        answered: dict[int, str] = {}
        while not store.check([*met.values()]):
            came = dict(each.split(":") for each in store.get(_CAME).decode().split()) if store.check([_CAME]) else {}
            heard = {int(each): said for each, said in came.items()}  # of each rank the last
            unanswered = {each: heard[each] for each in met if each in heard and heard[each] != answered.get(each)}
            if unanswered:
                keys = [f"start/{said}" for said in unanswered.values()]
                store.multi_set(keys, [start] * len(keys))  # type: ignore[attr-defined]  # as above
                answered |= unanswered
            if time.monotonic() >= deadline and (missing := [each for each in met if not store.check([met[each]])]):
                raise self._missing(missing, "start")
            time.sleep(_LOOK)
        return start

    def _await(self, store: Store, keys: list[str], timeout: float) -> None:
        """Wait for ``keys``, of which rank 0 sets each. Raises :class:`RankLostError`."""
        try:
            store.wait(keys, timedelta(seconds=timeout))
        except RuntimeError as error:
            raise RankLostError(
                f"rank 0 of {self._world.size} did not join within {self.timeout:g} s",
                why=str(error).splitlines()[0],
                fix="see the log of that rank, or raise run.timeout",
                rank=0,
            ) from error

    def renumber(self, world: World) -> None:
        """Every rank has another number from now on: this one that of ``world``."""
        self._world = world

    @property
    def group_store(self) -> Store:
        """For the process group, under a prefix of its own."""
        return PrefixStore("group", self._store)

    def agree(
        self, phase: str, outcome: Outcome[T], note: Callable[[T], Mapping[str, Any]] = lambda _: {}
    ) -> Agreement[T]:
        """Wait until all ranks have an outcome of ``phase``.

        If it failed on any rank, all raise: the lowest of these ranks its own error, the others :class:`PeerError`.
        """
        rank, store = self._world.rank, self._store
        notes: tuple[Mapping[str, Any], ...] = ()
        report = (
            {"failure": exit_code(outcome.error)} if outcome.error else {**note(outcome.values[0]), "failure": None}
        )
        store.set(f"{phase}/{rank}", json.dumps(report))
        verdict: dict[str, Any]
        if rank == 0:
            keys = [f"{phase}/{each}" for each in range(self._world.size)]
            self._wait(phase, keys, self.timeout)
            notes = tuple(json.loads(text) for text in store.multi_get(keys))
            failures = ((each, said["failure"]) for each, said in enumerate(notes) if said["failure"] is not None)
            failed, code = next(failures, (None, None))
            verdict = {"failed": failed, "code": code, "first": notes[0]}
            store.set(f"{phase}/verdict", json.dumps(verdict))
        else:
            self._wait(phase, [f"{phase}/verdict"], self.timeout + _SLACK)
            verdict = json.loads(store.get(f"{phase}/verdict"))
        if verdict["failed"] is None:
            return Agreement(outcome.values[0], verdict["first"], notes)
        if outcome.error is not None and verdict["failed"] == rank:
            raise outcome.error
        raise PeerError(verdict["failed"], verdict["code"])

    def decide(self, work: Callable[[], Mapping[str, str]], what: str = _DECIDED) -> Mapping[str, str]:
        """The result of ``work``, which rank 0 alone does, once for each ``what``. Raises there what that raises."""
        if not self._world.rank and not self._store.check([what]):
            outcome = attempt(work)
            failure = exit_code(outcome.error) if outcome.error else None
            self._store.set(what, json.dumps({"failure": failure, "result": dict(*outcome.values)}))
            if outcome.error:
                raise outcome.error
        self._await(self._store, [what], self.timeout + _SLACK)
        answer = json.loads(self._store.get(what))
        if answer["failure"] is not None:
            raise PeerError(0, answer["failure"])
        decided: dict[str, str] = answer["result"]
        return decided

    def decide_nothing(self) -> None:
        """Say on rank 0 that it has nothing to decide, if it has decided nothing: another rank may wait for it."""
        if not self._world.rank:
            self._store.compare_set(_DECIDED, "", json.dumps({"failure": None, "result": {}}))

    def remembered(self) -> Mapping[str, str]:
        """Return what ``runs/latest`` stood for in the first start; empty where nothing was kept."""
        kept = self._all_starts.check([_LATEST])
        return json.loads(self._all_starts.get(_LATEST)) if kept else {}

    def remember(self, latest: Mapping[str, str]) -> None:
        """Let later starts know what ``runs/latest`` stands for, if the store is one that outlives this start."""
        if self._world.rank == 0:
            self._all_starts.set(_LATEST, json.dumps(dict(latest)))

    def stand_by(self, alive: Callable[[], None]) -> ExitCode:
        """Wait as a spare until the ranks that train have ended: with which code. Calls ``alive`` meanwhile."""
        while not self._store.check([_OVER]):
            alive()
            time.sleep(_LOOK)
        return ExitCode(int(self._store.get(_OVER)))

    def release_spares(self, code: ExitCode) -> None:
        """Let the spares know that the training has ended with ``code``; the first rank that ends says it."""
        with suppress(RuntimeError):  # the store may be gone, and the spares with it
            self._store.compare_set(_OVER, "", str(int(code)))

    def _wait(self, phase: str, keys: list[str], timeout: float) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=timeout))
        except RuntimeError as error:
            raise self._name_missing(phase, error) from error

    def _name_missing(self, phase: str, error: RuntimeError) -> RunError:
        """The error that names the ranks which did not reach ``phase``; only the lowest of those that did reports."""
        came = (self._store.check([f"{phase}/{rank}"]) for rank in range(self._world.size))
        try:
            lowest = next(rank for rank, is_there in enumerate(came) if is_there)
            if lowest != self._world.rank:
                return PeerError(lowest, ExitCode.RANK_LOST)
            missing = [*range(lowest), *(rank for rank, is_there in enumerate(came, lowest + 1) if not is_there)] or [0]
        except RuntimeError:
            return RankLostError("the rank that serves the rendezvous is gone", why=str(error).splitlines()[0])
        return self._missing(missing, phase)

    def _missing(self, missing: Sequence[int], phase: str) -> RankLostError:
        return RankLostError(
            f"rank {', '.join(map(str, missing))} of {self._world.size} did not join within {self.timeout:g} s",
            why=f"phase {phase!r}",
            fix="see the log of that rank, or raise run.timeout",
            rank=missing[0],
        )

    def keep(self, table: Mapping[str, str]) -> str:
        """Store ``table`` under its SHA-256, which is returned, so that equal tables are stored once."""
        text = json.dumps(dict(table), sort_keys=True)
        name = sha256(text.encode()).hexdigest()
        if not self._store.check([f"table/{name}"]):
            self._store.set(f"table/{name}", text)
        return name

    def recall(self, name: str) -> dict[str, str]:
        """The table that some rank has stored under ``name``."""
        table: dict[str, str] = json.loads(self._store.get(f"table/{name}"))
        return table

    def find_cause(self, message: str, lost: int | None) -> tuple[int, str]:
        """The rank that knows why this one failed, and its message.

        Follow 'rank X is lost' reports to the rank that failed first: this rank fails with ``message`` because of rank
        ``lost``, which may have failed because of another rank, and so on.
        """
        speaker, heard = self._world.rank, {self._world.rank}
        with suppress(RuntimeError):  # a lost rank may not have reported, and the store may be gone with it
            self._store.set(f"word/{speaker}", json.dumps([message, lost]))
            while lost is not None and lost not in heard:
                heard.add(lost)
                self._store.wait([f"word/{lost}"], timedelta(seconds=_SLACK))
                speaker, (message, lost) = lost, json.loads(self._store.get(f"word/{lost}"))
        return speaker, message

    def leave(self) -> None:
        """Say that this rank needs the store no more. The rank that serves it waits for the others first."""
        with suppress(RuntimeError):
            self._store.set(f"left/{self._world.rank}", "")
            if self._world.serves_store:
                others = [f"left/{rank}" for rank in range(self._world.size)]
                self._store.wait(others, timedelta(seconds=_SLACK))


def agree_on_run(rendezvous: Rendezvous, resolve_run: ResolveRun, resolved: Outcome[ResolvedRun]) -> ResolvedRun:
    """The ``resolved`` run of this rank, with the runs that rank 0 found where it names ``runs/latest``. Collective.

    Another run may have begun between two ranks' looks.
    """

    def found(run: ResolvedRun) -> Mapping[str, Any]:
        named = run.request.latest
        return {"latest": dict((rendezvous.remembered() or named) if named else {})}

    rendezvous.decide_nothing()
    agreed = rendezvous.agree("resolve", resolved, found)
    latest, run = agreed.first["latest"], agreed.value
    if not latest:
        return run
    rendezvous.remember(latest)
    other = latest != dict(run.request.latest)
    return rendezvous.agree("latest", attempt(lambda: resolve_run(latest, rendezvous.decide) if other else run)).value


def _open_store(world: World, timeout: float) -> Store:
    """The store of ``world``; ``timeout`` seconds to reach it. Raises :class:`RankLostError` when nobody listens."""
    if world.size == 1:
        return HashStore()
    if world.init_method.startswith("file://"):
        return FileStore(world.init_method.removeprefix("file://"), world.size)
    host, _, port = world.init_method.removeprefix("tcp://").rpartition(":")
    try:
        return TCPStore(
            host,
            int(port),
            is_master=world.serves_store,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        verb = "open" if world.serves_store else "reach"
        raise RankLostError(
            f"rank {world.rank} cannot {verb} the rendezvous at {world.init_method}",
            why=str(error).splitlines()[0],
            fix="check that the first host is up and the port is free and open",
        ) from error


def check_digests(notes: Sequence[Mapping[str, Any]], recall: Callable[[str], Mapping[str, str]]) -> None:
    """Raise :class:`PluginError` with a table of what differs between ranks and on which hosts.

    Each note has ``host`` and ``digest``, the name under which ``recall`` finds a flat table of texts that must agree;
    the same name is the same table. Nothing is recalled while all agree.
    """
    names = {note["digest"] for note in notes}
    if len(names) < 2:
        return
    tables = {name: recall(name) for name in names}
    ranks = [(note["host"], tables[note["digest"]]) for note in notes]
    keys = sorted({key for table in tables.values() for key in table})
    differing = [key for key in keys if len({table.get(key) for table in tables.values()}) > 1]
    rows = "".join(f"\n  {_row(key, ranks)}" for key in differing)
    raise PluginError(
        "the ranks do not run the same thing",
        why=f"{len(differing)} {'entries differ' if len(differing) > 1 else 'entry differs'}",
        fix=f"install the same versions and pass the same arguments on every host{rows}",
    )


def _row(key: str, ranks: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """The values of ``key``, each with the ranks and hosts that have it; a SHA-256 is cut short."""
    holders: dict[str, list[str]] = {}
    for rank, (host, table) in enumerate(ranks):
        value = table.get(key, "nothing")
        value = value[:12] if _SHA256.fullmatch(value) else value
        holders.setdefault(value, []).append(f"{rank} ({host})")
    return f"{key}: " + ", ".join(f"{value} on rank {', '.join(having)}" for value, having in holders.items())


def check_gpus(notes: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`InputError` when two ranks have the same ``gpu``, a name unique in the world, empty on the CPU.

    A rank that sees one GPU cannot know whether it is its own or the only one of the host.
    """
    holders: dict[str, list[int]] = {}
    for rank, note in enumerate(notes):
        if note["gpu"]:
            holders.setdefault(note["gpu"], []).append(rank)
    shared = next((ranks for ranks in holders.values() if len(ranks) > 1), None)
    if shared is not None:
        raise InputError(
            f"rank {', '.join(map(str, shared))} would train on the same GPU of {notes[shared[0]]['host']}",
            why="each sees only this one",
            fix="start one rank for each GPU, set run.backend=gloo, or set run.device=cpu",
        )
