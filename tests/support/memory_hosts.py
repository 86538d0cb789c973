"""Hosts with steps in their memory: folders, whose ranks are threads that send each other bytes through queues."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, frombuffer, uint8

from megatron_run_engine.checkpoint.files import FileSystem
from megatron_run_engine.checkpoint.hosts import Hosts
from megatron_run_engine.checkpoint.manifest import Manifest
from megatron_run_engine.checkpoint.memory_home import MemoryHome
from megatron_run_engine.checkpoint.memory_saver import MemorySaver
from megatron_run_engine.checkpoint.reader import Reader
from megatron_run_engine.checkpoint.survivors import Found, Survivors
from tests.support.saved_steps import State, about, dealt, on_threads, shapes_of

#: As those of runs are: a home of another name is nobody's.
RUN = "0123456789abcdef" * 2


@dataclass
class Post:
    """Bytes between ranks that are threads, each pair's in their order. Nobody waits longer than ten seconds."""

    boxes: dict[tuple[int, int], queue.Queue[bytes]] = field(default_factory=dict)

    def of(self, rank: int) -> Postman:
        return Postman(rank, self.boxes)


@dataclass
class Postman:
    rank: int
    boxes: dict[tuple[int, int], queue.Queue[bytes]]

    def send(self, data: Tensor, target: int) -> None:
        self._box(self.rank, target).put(data.numpy().tobytes())

    def receive(self, data: Tensor, source: int) -> None:
        content = self._box(source, self.rank).get(timeout=10)
        assert len(content) == len(data), "the two ends agree on each block"
        data.copy_(frombuffer(bytearray(content), dtype=uint8))

    def _box(self, source: int, target: int) -> queue.Queue[bytes]:
        """The same for both ends, whoever comes first: a dictionary sets a default at once."""
        return self.boxes.setdefault((source, target), queue.Queue())


@dataclass
class Cluster:
    """Hosts, each a folder, with as many ranks as ``sizes`` say. ``said`` are the lines of rank 0."""

    folder: Path
    sizes: Sequence[int] = (2, 2)
    files: Mapping[int, FileSystem] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    run: str = RUN

    @property
    def host_of(self) -> list[int]:
        return [host for host, size in enumerate(self.sizes) for _ in range(size)]

    def home(self, host: int) -> MemoryHome:
        folder = self.folder / f"host{host}"
        folder.mkdir(exist_ok=True)
        return MemoryHome(folder, self.run, self.folder / "run", self.files.get(host))

    def path(self, host: int, step: int, file: int | str) -> Path:
        name = file if isinstance(file, str) else f"rank-{file:05d}.safetensors"
        return self.home(host).steps.folder(step) / name

    def on_ranks(self, work: Callable[[Any, MemoryHome, Hosts, Postman], Any]) -> list[Any]:
        post = Post()
        for host in range(len(self.sizes)):
            self.home(host).make()
        hosts = Hosts.seeing([self.home(host).token() for host in self.host_of])
        return on_threads(
            len(self.host_of),
            lambda ranks: work(ranks, self.home(self.host_of[ranks.rank]), hosts, post.of(ranks.rank)),
        )

    def save(self, step: int, state: State, **more: Any) -> list[Any]:
        """Save ``state``; by rank, the step's size or what was raised."""
        hands, shapes = dealt(step, state, len(self.host_of)), shapes_of(state)

        def save(ranks: Any, home: MemoryHome, hosts: Hosts, postman: Postman) -> int:
            files = self.files.get(hosts.host_of(ranks.rank))
            saver = MemorySaver(home, hosts, ranks, postman, files=files)
            return saver.save(about(step, run=self.run, **more), hands[ranks.rank], shapes)

        return self.on_ranks(save)

    def find(self, at_least: int = 1, read: Callable[[int, Manifest], Any] | None = None) -> list[Any]:
        """What each rank finds; it reads all, or the files that ``read`` says."""

        def find(ranks: Any, home: MemoryHome, hosts: Hosts, postman: Postman) -> Found | None:
            files = self.files.get(hosts.host_of(ranks.rank))
            survivors = Survivors(home, hosts, ranks, postman, self.said.append, files)
            return survivors.find(at_least, lambda manifest: read(ranks.rank, manifest) if read else manifest.files)

        found = self.on_ranks(find)
        assert not [each for each in found if isinstance(each, Exception)], found
        return found

    def found(self) -> tuple[int, State]:
        """The step that all ranks find, and its state as the last rank reads it."""
        found = self.find()
        assert len({each.step for each in found}) == 1
        return found[0].step, state_in(found[-1])


def state_in(found: Found) -> State:
    reader = Reader(found.steps.folder(found.step), found.manifest)
    return {
        name: {each: reader.read(name, each, (0,) * len(record.shape), record.shape) for each, record in fields.items()}
        for name, fields in found.manifest.tensors.items()
    }
