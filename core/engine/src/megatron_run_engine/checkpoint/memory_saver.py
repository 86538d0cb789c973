"""Saves a step in the memory of hosts, and finds the newest one that survives there.

A save: every rank writes its shards into the home of its host, and its neighbour on the next host writes a copy; then
each host commits its part, under one manifest. So a step outlives any one host.

A restart: each host says what it holds, and rank 0 chooses the newest step of which every file is somewhere. Hosts send
each other the files that their ranks read and they have not. A file that is not what the manifest says is removed and
named, and its other copy taken, else an older step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_run.contracts.activity import Activity
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.collectives import as_note, on_all_ranks, on_rank0, raise_first
from megatron_run_engine.checkpoint.exchange import Fault, Transport, exchange
from megatron_run_engine.checkpoint.files import FileSystem, MemoryFiles, no_heartbeat, read_whole, saving
from megatron_run_engine.checkpoint.hosts import Transfer
from megatron_run_engine.checkpoint.manifest import LARGEST, MANIFEST, Manifest, decode_manifest, make_manifest
from megatron_run_engine.checkpoint.memory_home import Held, MemoryHome
from megatron_run_engine.checkpoint.saving import Note, Shapes, ShardWriter, joined
from megatron_run_engine.checkpoint.shard_file import file_name
from megatron_run_engine.checkpoint.step_folder import Checkpoints, verify_files

if TYPE_CHECKING:
    from megatron_run.contracts.optimizer import StatePiece
    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.checkpoint.hosts import Hosts
    from megatron_run_engine.checkpoint.manifest import About

_ROOM = "make room or write access there"


class MemorySaver:
    """Saves steps in the ``home`` of each host. Its methods are collective, and raise on all ranks if one fails."""

    def __init__(
        self,
        home: MemoryHome,
        hosts: Hosts,
        ranks: Ranks,
        transport: Transport,
        activity: Activity | None = None,
        files: FileSystem | None = None,
        files_of_rank: int = 1,
    ) -> None:
        self._home, self._hosts, self._ranks, self._transport = home, hosts, ranks, transport
        self._activity, self._files = activity or Activity(), files or MemoryFiles()
        self._shards = ShardWriter(ranks.rank, self._files, self._activity, files_of_rank)
        self._leads = hosts.leads(ranks.rank)

    def save(self, about: About, pieces: Iterable[StatePiece], shapes: Shapes) -> int:
        """Save the step of ``about`` as :meth:`Saver.save` does, with copies on the next host; its size in bytes."""
        step, ranks = about.step, self._ranks
        try:
            on_all_ranks(ranks, lambda: self._begin(step))
            note, failure = self._write(step, pieces, shapes)
            notes = ranks.gather(json.dumps(note))
            content, owners = json.loads(on_rank0(ranks, lambda: _agreed(about, notes), failure))
            manifest = decode_manifest(content.encode(), f"step {step} in memory")
            on_all_ranks(ranks, lambda: self._send_copies(manifest, owners))
            on_all_ranks(ranks, lambda: self._commit(manifest))
        except BaseException:
            if self._leads:
                self._home.give_up(step)
            raise
        return manifest.size

    def _begin(self, step: int) -> None:
        if self._leads:
            with saving(f"step {step} could not be saved in memory", _ROOM):
                self._home.begin(step)

    def _write(self, step: int, pieces: Iterable[StatePiece], shapes: Shapes) -> tuple[Note, Exception | None]:
        """Write this rank's shards. Return the report for rank 0, and the error if it failed."""
        folder = self._home.temporary(step)
        try:
            with saving(f"step {step} could not be saved in memory", _ROOM):
                self._activity.enter("save-memory", f"step{step}/{file_name(self._ranks.rank)}")
                return self._shards.write(folder, pieces, shapes), None
        except Exception as error:  # any error: rank 0 waits for this rank's report
            return {"failure": as_note(error, f"step {step} could not be saved in memory")}, error

    def _send_copies(self, manifest: Manifest, owners: Mapping[str, int]) -> None:
        step, rank = manifest.about.step, self._ranks.rank
        sizes = {name: file.bytes for name, file in manifest.files.items()}
        transfers = [each for each in self._hosts.copies(sizes, owners) if rank in (each.source, each.target)]
        folder, beat = self._home.temporary(step), self._activity.heartbeat
        failure: Exception | None = None
        try:
            self._activity.enter("save-neighbour", f"step{step}")
        except Exception as error:  # any error: the neighbours wait for this rank's files
            failure = error
        faults = exchange(transfers, rank, self._transport, folder, manifest, self._files, beat)
        with saving(f"step {step} could not be saved in memory", _ROOM):
            for each in (failure, *(fault.error for fault in faults)):
                if each is not None:
                    raise each

    def _commit(self, manifest: Manifest) -> None:
        if self._leads:
            self._activity.enter("save-memory-commit", f"step{manifest.about.step}")
            with saving(f"step {manifest.about.step} could not be saved in memory", _ROOM):
                self._home.commit(manifest)


def _agreed(about: About, notes: Sequence[str]) -> str:
    """The manifest of the shards that the ranks report, as text, and which rank wrote each file; as JSON."""
    reports = [json.loads(text) for text in notes]
    raise_first([json.dumps(report["failure"]) for report in reports])
    files = {name: file for report in reports for name, file in report["files"].items()}
    owners = {name: rank for rank, report in enumerate(reports) for name in report["files"]}
    return json.dumps((make_manifest(about, files, joined(reports)).encode().decode(), owners))


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

    def find(self, at_least: int, read_by: Callable[[Manifest], Collection[str]]) -> Found | None:
        """The newest step from ``at_least`` on whose files are all there and right; None if there is none. Collective.

        ``read_by``, collective too, says which files this rank reads. It is asked only where a host has not all.
        """
        while True:
            chosen = self._choose(at_least)
            if chosen is None:
                return None
            manifest = self._manifest(chosen)
            if not self._refuse(manifest, self._fetch(manifest, chosen, read_by)):
                return Found(self._home.steps, manifest.about.step, manifest)

    def _choose(self, at_least: int) -> Chosen | None:
        """One round: every host says what it holds, and rank 0 what is taken."""
        notes = self._ranks.gather(json.dumps(self._surveyed()))

        def decide() -> str:
            surveys = [json.loads(notes[ranks[0]]) for ranks in self._hosts.ranks]
            for _, refused in surveys:
                for line in refused:
                    self._log(f"in memory {line}; it is not used")
            chosen, lines = choose([[Held(*each) for each in held] for held, _ in surveys], at_least)
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
    ) -> tuple[list[str], list[Fault]]:
        """Get what the ranks of this host read and it has not: what they read that was here, and what failed here."""
        rank, step = self._ranks.rank, chosen.step
        if all(len(held) == len(manifest.files) for held in chosen.held):
            return sorted(manifest.files), []
        notes = self._ranks.gather(json.dumps(sorted(read_by(manifest))))

        def plan() -> str:
            wanted = [set().union(*(json.loads(notes[each]) for each in ranks)) for ranks in self._hosts.ranks]
            sizes = {name: file.bytes for name, file in manifest.files.items()}
            return json.dumps(([sorted(each) for each in wanted], self._hosts.fetches(sizes, wanted, chosen.held)))

        wanted, planned = json.loads(on_rank0(self._ranks, plan))
        host, transfers = self._hosts.host_of(rank), [Transfer(*each) for each in planned]

        def take_in() -> None:
            if self._hosts.leads(rank):
                with saving(f"step {step} could not be taken from another host's memory"):
                    self._home.take_in(manifest, anew=not chosen.held[host])

        on_all_ranks(self._ranks, take_in)
        listed = [each for each in transfers if rank in (each.source, each.target)]
        folder = self._home.steps.folder(step)
        faults = exchange(listed, rank, self._transport, folder, manifest, self._files, self._heartbeat)
        fetched = {each.file for each in transfers if self._hosts.host_of(each.target) == host}
        return [name for name in wanted[host] if name not in fetched], faults  # what has come is verified

    def _refuse(self, manifest: Manifest, fetched: tuple[list[str], list[Fault]]) -> bool:
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
            if not isinstance(fault.error, CheckpointError):
                with saving(f"step {manifest.about.step} could not be taken from another host's memory"):
                    raise fault.error
            yield Bad(self._hosts.host_of(fault.transfer.source), fault.transfer.file, str(fault.error))
        folder = self._home.steps.folder(manifest.about.step)
        for name in self._hosts.share(rank, kept):
            try:
                verify_files(folder, manifest, (name,), heartbeat=self._heartbeat, fast=True)
            except CheckpointError as error:
                yield Bad(self._hosts.host_of(rank), name, str(error))


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


def choose(hosts: Sequence[Sequence[Held]], at_least: int) -> tuple[Chosen | None, list[str]]:
    """The newest step, from ``at_least`` on, of which the ``hosts`` hold every file together; and lines on others.

    Two manifests of one step are of two saves, which a lost host may have missed: each is judged by itself.
    """
    lines: list[str] = []
    seen = {(held.step, held.sha256) for holding in hosts for held in holding if held.step >= at_least}
    for step, sha256 in sorted(seen, reverse=True):
        parts = [next((each for each in held if (each.step, each.sha256) == (step, sha256)), None) for held in hosts]
        first, size, whole = next((host, part.size, part.whole) for host, part in enumerate(parts) if part is not None)
        files = [() if part is None else part.files for part in parts]
        there = len(set().union(*files))
        if there == whole:
            return Chosen(step, first, size, files), lines
        lines.append(f"step {step} in memory is not whole: {whole - there} of its {whole} files are on no host")
    return None, lines
