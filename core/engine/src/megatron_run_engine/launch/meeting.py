"""Ranks meet at a store and compare notes before they build anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from megatron_run.errors import ExitCode, RankLostError, RunError
from megatron_run_engine.launch.failure import exit_code
from megatron_run_engine.launch.store import open_store
from megatron_run_engine.runtime.world import World

T = TypeVar("T")

#: Seconds that ranks wait longer than rank 0, so that it is rank 0 that says who is missing.
_SLACK = 2.0


class PeerError(RunError):
    """A lower rank has already said what is wrong: this rank ends with the same code and says nothing."""

    def __init__(self, rank: int, code: int) -> None:
        super().__init__(f"rank {rank} failed")
        self.exit_code = ExitCode(code)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a piece of work returned, or what it raised, kept until the other ranks know."""

    values: tuple[T, ...]
    error: Exception | None = None


def attempt(work: Callable[[], T]) -> Outcome[T]:
    """Do ``work``."""
    try:
        return Outcome((work(),))
    except Exception as error:
        return Outcome((), error)


@dataclass(frozen=True)
class Settled(Generic[T]):
    """A phase that went well on every rank: what this one's work returned, and what was noted of it.

    ``first`` is rank 0's note, ``notes`` those of all ranks, which only rank 0 has.
    """

    value: T
    first: Mapping[str, Any]
    notes: tuple[Mapping[str, Any], ...] = ()


class Meeting:
    """The ranks of one world around a key-value store, each phase of notes under its own key.

    Rank 0 reads what all ranks note, once; the others read one verdict of fixed size. So a phase costs the store time
    and bytes proportional to the number of ranks.
    """

    def __init__(self, world: World, timeout: float) -> None:
        self._world = world
        self._timeout = timeout
        self._store = open_store(world, timeout)

    @property
    def store(self) -> Store:
        """For the process group, under a prefix of its own."""
        return PrefixStore("group", self._store)

    def settle(
        self, phase: str, outcome: Outcome[T], note: Callable[[T], Mapping[str, Any]] = lambda _: {}
    ) -> Settled[T]:
        """Wait until all ranks have an outcome of ``phase``. If any failed, all raise, the lowest its own error."""
        mine = {"failure": exit_code(outcome.error)} if outcome.error else {**note(outcome.values[0]), "failure": None}
        self._store.set(f"{phase}/{self._world.rank}", json.dumps(mine))
        notes = self._collect(phase) if self._world.rank == 0 else ()
        verdict = self._publish(phase, notes) if notes else self._learn(phase)
        failed = verdict["failed"]
        if failed is None:
            return Settled(outcome.values[0], verdict["first"], notes)
        if outcome.error is not None and failed == self._world.rank:
            raise outcome.error
        raise PeerError(failed, verdict["code"])

    def keep(self, table: Mapping[str, str]) -> str:
        """Leave ``table`` at the store under its SHA-256, which is returned. Tables that are the same are one."""
        text = json.dumps(dict(table), sort_keys=True)
        name = sha256(text.encode()).hexdigest()
        if not self._store.check([f"table/{name}"]):
            self._store.set(f"table/{name}", text)
        return name

    def recall(self, name: str) -> dict[str, str]:
        """The table that some rank has kept under ``name``."""
        table: dict[str, str] = json.loads(self._store.get(f"table/{name}"))
        return table

    def first_word(self, message: str, lost: int | None) -> tuple[int, str]:
        """The rank that knows why this one fails, and what it says.

        It is this one, which has ``message`` to say, unless that says that rank ``lost`` is lost and ``lost`` has
        something to say itself: then it is that one, and so on.
        """
        speaker, heard = self._world.rank, {self._world.rank}
        with suppress(RuntimeError):  # who is lost has said nothing, and the store may be gone with it
            self._store.set(f"word/{speaker}", json.dumps([message, lost]))
            while lost is not None and lost not in heard:
                heard.add(lost)
                self._store.wait([f"word/{lost}"], timedelta(seconds=_SLACK))
                speaker, (message, lost) = lost, json.loads(self._store.get(f"word/{lost}"))
        return speaker, message

    def leave(self) -> None:
        """Say that this rank needs the store no more. Where it lives in this rank, the others are waited for."""
        with suppress(RuntimeError):
            self._store.set(f"left/{self._world.rank}", "")
            if self._world.serves_store:
                others = [f"left/{rank}" for rank in range(self._world.size)]
                self._store.wait(others, timedelta(seconds=_SLACK))

    def _collect(self, phase: str) -> tuple[dict[str, Any], ...]:
        """Everybody's note of ``phase``, by rank."""
        keys = [f"{phase}/{rank}" for rank in range(self._world.size)]
        self._wait(phase, keys, self._timeout)
        return tuple(json.loads(note) for note in self._store.multi_get(keys))

    def _publish(self, phase: str, notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Tell the others which rank is the lowest that failed, and what rank 0 noted."""
        failures = ((rank, note["failure"]) for rank, note in enumerate(notes) if note["failure"] is not None)
        failed, code = next(failures, (None, None))
        verdict = {"failed": failed, "code": code, "first": notes[0]}
        self._store.set(f"{phase}/verdict", json.dumps(verdict))
        return verdict

    def _learn(self, phase: str) -> dict[str, Any]:
        self._wait(phase, [f"{phase}/verdict"], self._timeout + _SLACK)
        verdict: dict[str, Any] = json.loads(self._store.get(f"{phase}/verdict"))
        return verdict

    def _wait(self, phase: str, keys: list[str], timeout: float) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=timeout))
        except RuntimeError as error:
            raise self._lost(phase, error) from error

    def _lost(self, phase: str, error: RuntimeError) -> RunError:
        """Name the ranks without a note; of those that came only the lowest speaks."""
        ranks = range(self._world.size)
        try:
            lowest = next(rank for rank in ranks if self._came(phase, rank))
            if lowest != self._world.rank:
                return PeerError(lowest, ExitCode.RANK_LOST)
            missing = [str(rank) for rank in ranks if not self._came(phase, rank)]
        except RuntimeError:
            return RankLostError("the rank that keeps the meeting point is gone", why=str(error).splitlines()[0])
        return RankLostError(
            f"rank {', '.join(missing) or '0'} of {self._world.size} did not join within {self._timeout:g} s",
            why=f"phase {phase!r}",
            fix="see the log of that rank, or raise run.timeout",
            rank=int((missing or ["0"])[0]),
        )

    def _came(self, phase: str, rank: int) -> bool:
        return self._store.check([f"{phase}/{rank}"])


def close_group() -> None:
    """Leave the process group, if there is one; a peer that is gone does not matter any more."""
    with suppress(RuntimeError, ValueError):
        if dist.is_initialized():
            dist.destroy_process_group()
