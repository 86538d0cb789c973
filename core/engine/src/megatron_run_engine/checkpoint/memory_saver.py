"""Saves a step in the memory of hosts.

Every rank writes its shards into the home of its host, and its neighbour on the next host writes a copy; then each host
commits its part, under one manifest. So a step outlives any one host.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_run.contracts.activity import Activity
from megatron_run_engine.checkpoint.collectives import as_note, on_all_ranks, on_rank0, raise_first
from megatron_run_engine.checkpoint.exchange import Blocks, Transport, exchange
from megatron_run_engine.checkpoint.files import FileSystem, MemoryFiles, finding_memory, saving
from megatron_run_engine.checkpoint.manifest import Manifest, decode_manifest, make_manifest
from megatron_run_engine.checkpoint.memory_home import MemoryHome
from megatron_run_engine.checkpoint.saving import Note, Shapes, ShardWriter, joined
from megatron_run_engine.checkpoint.shard_file import file_name

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
            blocks = on_all_ranks(ranks, lambda: self._begin(step))
            note, failure = self._write(step, pieces, shapes)
            notes = ranks.gather(json.dumps(note))
            content, owners = json.loads(on_rank0(ranks, lambda: _agreed(about, notes), failure))
            manifest = decode_manifest(content.encode(), f"step {step} in memory")
            on_all_ranks(ranks, lambda: self._send_copies(manifest, owners, blocks))
            on_all_ranks(ranks, lambda: self._commit(manifest))
        except BaseException:
            if self._leads:
                self._home.give_up(step)
            raise
        return manifest.size

    def _begin(self, step: int) -> Blocks:
        with saving(f"step {step} could not be saved in memory", _ROOM), finding_memory():
            if self._leads:
                self._home.begin(step)
            return Blocks()

    def _write(self, step: int, pieces: Iterable[StatePiece], shapes: Shapes) -> tuple[Note, Exception | None]:
        """Write this rank's shards. Return the report for rank 0, and the error if it failed."""
        folder = self._home.temporary(step)
        try:
            with saving(f"step {step} could not be saved in memory", _ROOM), finding_memory():
                self._activity.enter("save-memory", f"step{step}/{file_name(self._ranks.rank)}")
                return self._shards.write(folder, pieces, shapes), None
        except Exception as error:  # any error: rank 0 waits for this rank's report
            return {"failure": as_note(error, f"step {step} could not be saved in memory")}, error

    def _send_copies(self, manifest: Manifest, owners: Mapping[str, int], blocks: Blocks) -> None:
        step, rank = manifest.about.step, self._ranks.rank
        sizes = {name: file.bytes for name, file in manifest.files.items()}
        transfers = [each for each in self._hosts.copies(sizes, owners) if rank in (each.source, each.target)]
        folder, beat = self._home.temporary(step), self._activity.heartbeat
        failure: Exception | None = None
        try:
            self._activity.enter("save-neighbour", f"step{step}")
        except Exception as error:  # any error: the neighbours wait for this rank's files
            failure = error
        faults = exchange(transfers, rank, self._transport, blocks, folder, manifest, self._files, beat)
        with saving(f"step {step} could not be saved in memory", _ROOM), finding_memory():
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
