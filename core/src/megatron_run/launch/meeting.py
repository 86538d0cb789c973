"""Ranks meet at a store and compare notes before they build anything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from megatron_run.errors import ExitCode, PluginError, RankLostError, RunError
from megatron_run.launch.failure import exit_code
from megatron_run.world import World

T = TypeVar("T")

#: Seconds that ranks wait longer than rank 0, so that it is rank 0 that says who is missing.
_SLACK = 2.0
_SHA256 = re.compile("[0-9a-f]{64}")


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


class Meeting:
    """The ranks of one world around a key-value store, each phase of notes under its own key."""

    def __init__(self, world: World, timeout: float) -> None:
        self._world = world
        self._timeout = timeout
        self._store = _open_store(world, timeout)

    @property
    def store(self) -> Store:
        """For the process group, under a prefix of its own."""
        return PrefixStore("group", self._store)

    def settle(
        self, phase: str, outcome: Outcome[T], note: Callable[[T], Mapping[str, Any]] = lambda _: {}
    ) -> tuple[T, list[dict[str, Any]]]:
        """This rank's result and everybody's note of it. If any rank failed, all raise, the lowest its own error."""
        mine = {"failure": exit_code(outcome.error)} if outcome.error else {**note(outcome.values[0]), "failure": None}
        notes = self._gather(phase, mine)
        for rank, each in enumerate(notes):
            if each["failure"] is not None:
                if outcome.error is not None and rank == self._world.rank:
                    raise outcome.error
                raise PeerError(rank, each["failure"])
        return outcome.values[0], notes

    def leave(self) -> None:
        """Say that this rank needs the store no more. Where it lives in this rank, the others are waited for."""
        with suppress(RuntimeError):
            self._store.set(f"left/{self._world.rank}", "")
            if self._world.serves_store:
                others = [f"left/{rank}" for rank in range(self._world.size)]
                self._store.wait(others, timedelta(seconds=_SLACK))

    def _gather(self, phase: str, note: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Everybody's note of ``phase``, by rank. Rank 0 collects and publishes them."""
        size, together = self._world.size, f"{phase}/all"
        keys = [f"{phase}/{rank}" for rank in range(size)]
        self._store.set(keys[self._world.rank], json.dumps(dict(note)))
        if self._world.rank == 0:
            self._wait(phase, keys, self._timeout)
            notes = ",".join(self._store.get(key).decode() for key in keys)
            self._store.set(together, f"[{notes}]")
        else:
            self._wait(phase, [*keys, together], self._timeout + _SLACK)
        gathered: list[dict[str, Any]] = json.loads(self._store.get(together))
        return gathered

    def _wait(self, phase: str, keys: Sequence[str], timeout: float) -> None:
        try:
            self._store.wait(list(keys), timedelta(seconds=timeout))
        except RuntimeError as error:
            raise self._lost(phase, keys, error) from error

    def _lost(self, phase: str, keys: Sequence[str], error: RuntimeError) -> RunError:
        """Name the ranks without a note; of those that came only the lowest speaks."""
        try:
            present = [self._store.check([key]) for key in keys[: self._world.size]]
        except RuntimeError:
            return RankLostError("the rank that keeps the meeting point is gone", why=str(error).splitlines()[0])
        missing = [str(rank) for rank, here in enumerate(present) if not here]
        if present.index(True) != self._world.rank:
            return PeerError(present.index(True), ExitCode.RANK_LOST)
        return RankLostError(
            f"rank {', '.join(missing) or '0'} of {self._world.size} did not join within {self._timeout:g} s",
            why=f"phase {phase!r}",
            fix="see the log of that rank, or raise run.timeout",
        )


def _open_store(world: World, timeout: float) -> Store:
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
        raise RankLostError(
            f"rank {world.rank} cannot reach the meeting point {world.init_method}",
            why=str(error).splitlines()[0],
            fix="check that the first host is up and the port is free and open",
        ) from error


def check_digests(notes: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`PluginError` with a table of what differs between ranks and on which hosts.

    Each note has ``host`` and ``digest``, a flat table of texts that must agree.
    """
    keys = sorted({key for note in notes for key in note["digest"]})
    differing = [key for key in keys if len({note["digest"].get(key) for note in notes}) > 1]
    if differing:
        table = "".join(f"\n  {_row(key, notes)}" for key in differing)
        raise PluginError(
            "the ranks do not run the same thing",
            why=f"{len(differing)} {'entries differ' if len(differing) > 1 else 'entry differs'}",
            fix=f"install the same versions and pass the same arguments on every host{table}",
        )


def _row(key: str, notes: Sequence[Mapping[str, Any]]) -> str:
    """The values of ``key``, each with the ranks and hosts that have it; a SHA-256 is cut short."""
    holders: dict[str, list[str]] = {}
    for rank, note in enumerate(notes):
        value = note["digest"].get(key, "nothing")
        value = value[:12] if _SHA256.fullmatch(value) else value
        holders.setdefault(value, []).append(f"{rank} ({note['host']})")
    return f"{key}: " + ", ".join(f"{value} on rank {', '.join(ranks)}" for value, ranks in holders.items())


def close_group() -> None:
    """Leave the process group, if there is one; a peer that is gone does not matter any more."""
    with suppress(RuntimeError, ValueError):
        if dist.is_initialized():
            dist.destroy_process_group()
