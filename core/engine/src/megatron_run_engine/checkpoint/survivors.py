"""Finds the newest step that survives in the memory of hosts, after a restart.

Each host says what it holds, and rank 0 chooses the newest step of which every file is somewhere. Hosts send each other
the files that their ranks read and they have not. A file that is not what the manifest says is removed and named, and
its other copy taken, else an older step; so it is where a host has no room for what it lacks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.collectives import as_note, on_all_ranks, on_rank0, raise_first
from megatron_run_engine.checkpoint.exchange import Blocks, Fault, Transport, exchange
from megatron_run_engine.checkpoint.files import (
    FileSystem,
    MemoryFiles,
    finding_memory,
    no_heartbeat,
    read_whole,
    reason,
)
from megatron_run_engine.checkpoint.hosts import Transfer
from megatron_run_engine.checkpoint.manifest import LARGEST, MANIFEST, Manifest, decode_manifest
from megatron_run_engine.checkpoint.memory_home import Held, MemoryHome
from megatron_run_engine.checkpoint.step_folder import Checkpoints, verify_files

if TYPE_CHECKING:
    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.checkpoint.hosts import Hosts


class Found(NamedTuple):
    """The newest step that memory holds, verified: what this rank reads of it lies in ``steps`` on its host."""

    steps: Checkpoints
    step: int
    manifest: Manifest


class Survivors:
    """Finds what the memory of all hosts still holds after ranks or hosts were lost. ``log`` gets lines on rank 0."""

    def __init__(
        self,
        home: MemoryHome,
        hosts: Hosts,
        ranks: Ranks,
        transport: Transport,
        log: Callable[[str], object],
        files: FileSystem | None = None,
        heartbeat: Callable[[], None] = no_heartbeat,
    ) -> None:
        self._home, self._hosts, self._ranks, self._transport, self._log = home, hosts, ranks, transport, log
        self._files, self._heartbeat = files or MemoryFiles(), heartbeat
        #: Why the last search did not take the newest step that the hosts hold: one has no room. Empty if all had.
        self.lacks_room = ""

    def find(self, at_least: int, read_by: Callable[[Manifest], Collection[str]]) -> Found | None:
        """The newest step from ``at_least`` on whose files are all there and right; None if there is none. Collective.

        ``read_by``, collective too, says which files this rank reads. It is asked only where a host has not all.
        """
        below, self.lacks_room = None, ""
        while (chosen := self._choose(at_least, below)) is not None:
            manifest = self._manifest(chosen)
            fetched = self._fetch(manifest, chosen, read_by)
            if fetched is None:
                below = chosen.step
            elif not self._refuse(manifest, fetched):
                return Found(self._home.steps, manifest.about.step, manifest)
        return None

    def _choose(self, at_least: int, below: int | None) -> Chosen | None:
        """One round: every host says what it holds, and rank 0 what is taken."""
        notes = self._ranks.gather(json.dumps(self._surveyed()))

        def decide() -> str:
            surveys = [json.loads(notes[ranks[0]]) for ranks in self._hosts.ranks]
            for _, refused in surveys:
                for line in refused:
                    self._log(f"in memory {line}; it is not used")
            chosen, lines = choose([[Held(*each) for each in held] for held, _ in surveys], at_least, below)
            for line in lines:
                self._log(line)
            return json.dumps(chosen)

        answer = json.loads(on_rank0(self._ranks, decide))
        return None if answer is None else Chosen(*answer)

    def _surveyed(self) -> tuple[list[Held], list[str]]:
        """The steps of this host, as its leader says them."""
        try:
            return self._home.survey() if self._hosts.leads(self._ranks.rank) else ([], [])
        except OSError as error:  # the other ranks wait for this one's word
            return [], [f"{self._home.path} cannot be read: {error.strerror}"]

    def _manifest(self, chosen: Chosen) -> Manifest:
        """The manifest of the chosen step on every rank, whose host may have lost it."""
        rank, holder = self._ranks.rank, self._hosts.ranks[chosen.holder][0]
        path = self._home.steps.folder(chosen.step) / MANIFEST
        if all(chosen.held):
            return on_all_ranks(self._ranks, lambda: self._home.steps.manifest(chosen.step))

        def content() -> str:
            if not holder:
                return read_whole(path, LARGEST).decode()
            memory = torch.empty(chosen.size, dtype=torch.uint8)
            self._transport.receive(memory, holder)
            return memory.numpy().tobytes().decode()

        if rank == holder and rank:
            self._transport.send(torch.frombuffer(bytearray(read_whole(path, LARGEST)), dtype=torch.uint8), 0)
        return decode_manifest(on_rank0(self._ranks, content).encode(), f"step {chosen.step} in memory")

    def _fetch(
        self, manifest: Manifest, chosen: Chosen, read_by: Callable[[Manifest], Collection[str]]
    ) -> Fetched | None:
        """Get what the ranks of this host read and it has not; None where a host has no room for that."""
        rank, host = self._ranks.rank, self._hosts.host_of(self._ranks.rank)
        if all(len(held) == len(manifest.files) for held in chosen.held):
            return Fetched(sorted(manifest.files), [])
        wanted, transfers = self._plan(manifest, chosen, read_by)
        coming = {each.file for each in transfers if self._hosts.host_of(each.target) == host}
        blocks, why = on_all_ranks(self._ranks, lambda: self._take_in(manifest, anew=not chosen.held[host]))
        faults: list[Fault] = []
        if room := self._all_have_room(chosen.step, why):
            assert blocks is not None, "there is room"
            listed = [each for each in transfers if rank in (each.source, each.target)]
            folder = self._home.steps.folder(chosen.step)
            faults = exchange(listed, rank, self._transport, blocks, folder, manifest, self._files, self._heartbeat)
            unwritten = [fault.error for fault in faults if isinstance(fault.error, OSError)]
            room = self._all_have_room(chosen.step, reason(unwritten[0]) if unwritten else "")
        if not room:
            if self._hosts.leads(rank):
                self._home.give_back(chosen.step, coming)
            return None
        return Fetched([name for name in wanted[host] if name not in coming], faults)  # what has come is verified

    def _plan(
        self, manifest: Manifest, chosen: Chosen, read_by: Callable[[Manifest], Collection[str]]
    ) -> tuple[Sequence[Collection[str]], list[Transfer]]:
        """The files that each host reads, and what is sent to those that have them not."""
        notes = self._ranks.gather(json.dumps(sorted(read_by(manifest))))

        def plan() -> str:
            wanted = [set().union(*(json.loads(notes[each]) for each in ranks)) for ranks in self._hosts.ranks]
            sizes = {name: file.bytes for name, file in manifest.files.items()}
            return json.dumps(([sorted(each) for each in wanted], self._hosts.fetches(sizes, wanted, chosen.held)))

        wanted, planned = json.loads(on_rank0(self._ranks, plan))
        return wanted, [Transfer(*each) for each in planned]

    def _take_in(self, manifest: Manifest, *, anew: bool) -> tuple[Blocks | None, str]:
        """Make this rank and its host ready for what comes; or why there is no room for it."""
        try:
            with finding_memory():
                if self._hosts.leads(self._ranks.rank):
                    self._home.take_in(manifest, anew=anew)
                return Blocks(), ""
        except OSError as error:
            return None, reason(error)

    def _all_have_room(self, step: int, why: str) -> bool:
        """Whether no rank says ``why`` it has no room for its part of ``step``; a line is for the first. Collective."""
        notes = self._ranks.gather(json.dumps(why))

        def first() -> str:
            said = (f"rank {rank}: {json.loads(note)}" for rank, note in enumerate(notes) if json.loads(note))
            lacking = next(said, "")
            if lacking:
                self._log(f"step {step} in memory is not used: a host has no room for what it lacks of it: {lacking}")
            return lacking

        lacking = on_rank0(self._ranks, first)
        self.lacks_room = self.lacks_room or lacking
        return not lacking

    def _refuse(self, manifest: Manifest, fetched: Fetched) -> bool:
        """Verify the files of ``manifest``. Remove copies that any rank finds wrong; whether there were any."""
        step, failure, bad = manifest.about.step, None, list[Bad]()
        try:
            bad = [*self._verify(manifest, *fetched)]
        except Exception as error:  # any error: the other ranks wait for this one's word
            failure = error
        notes = self._ranks.gather(json.dumps((as_note(failure) if failure else None, bad)))

        def collect() -> str:
            said = [json.loads(note) for note in notes]
            raise_first([json.dumps(failed) for failed, _ in said])
            found = {(each[0], each[1]): Bad(*each) for _, bad in said for each in bad}
            for each in found.values():
                self._log(f"in memory {each.why}; this copy is not used")
            return json.dumps(list(found.values()))

        found = [Bad(*each) for each in json.loads(on_rank0(self._ranks, collect, failure))]
        if found:
            on_all_ranks(self._ranks, lambda: self._remove(step, found))  # they are gone before anybody looks again
        return bool(found)

    def _remove(self, step: int, found: Iterable[Bad]) -> None:
        """Remove those of ``found`` on this host. Raises :class:`CheckpointError` for one that stays."""
        host, leads = self._hosts.host_of(self._ranks.rank), self._hosts.leads(self._ranks.rank)
        for each in (each for each in found if leads and each.host == host):
            self._home.refuse(step, each.file)
            if os.path.lexists(path := self._home.steps.folder(step) / each.file):
                raise CheckpointError(f"{path} is not what it was, and cannot be removed", fix="remove it")

    def _verify(self, manifest: Manifest, kept: Iterable[str], faults: Iterable[Fault]) -> Iterator[Bad]:
        """The copies that this rank finds wrong: of its share of the host's ``kept`` files, and of what has come."""
        rank = self._ranks.rank
        for fault in faults:
            yield Bad(self._hosts.host_of(fault.transfer.source), fault.transfer.file, str(fault.error))
        folder = self._home.steps.folder(manifest.about.step)
        for name in self._hosts.share(rank, kept):
            try:
                verify_files(folder, manifest, (name,), heartbeat=self._heartbeat, fast=True)
            except CheckpointError as error:
                yield Bad(self._hosts.host_of(rank), name, str(error))


class Fetched(NamedTuple):
    """The files that a host ``kept`` and its ranks read, and the ``faults`` of what was to come."""

    kept: Sequence[str]
    faults: Sequence[Fault]


class Bad(NamedTuple):
    """A copy of ``file`` on ``host`` that is not what the manifest says."""

    host: int
    file: str
    why: str


class Chosen(NamedTuple):
    """The step to take, the host that has its manifest, of so many bytes, and the files that each host ``held``."""

    step: int
    holder: int
    size: int
    held: Sequence[Sequence[str]]


def choose(hosts: Sequence[Sequence[Held]], at_least: int, below: int | None = None) -> tuple[Chosen | None, list[str]]:
    """The newest step, from ``at_least`` on, of which the ``hosts`` hold every file together; and lines on others.

    Steps from ``below`` on are left out.

    Two manifests of one step are of two saves, which a lost host may have missed: each is judged by itself.
    """
    lines: list[str] = []
    seen = {(held.step, held.sha256) for holding in hosts for held in holding if held.step >= at_least}
    seen = {each for each in seen if below is None or each[0] < below}
    for step, sha256 in sorted(seen, reverse=True):
        parts = [next((each for each in held if (each.step, each.sha256) == (step, sha256)), None) for held in hosts]
        first, size, whole = next((host, part.size, part.whole) for host, part in enumerate(parts) if part is not None)
        files = [() if part is None else part.files for part in parts]
        there = len(set().union(*files))
        if there == whole:
            return Chosen(step, first, size, files), lines
        lines.append(f"step {step} in memory is not whole: {whole - there} of its {whole} files are on no host")
    return None, lines
