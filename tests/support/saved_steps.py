"""Steps to save without a training: random logical tensors, cut into boxes that several ranks hold."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_run.contracts.optimizer import StatePiece
from megatron_run_engine.checkpoint.async_saver import AsyncSaver, Staging
from megatron_run_engine.checkpoint.boxes import Box
from megatron_run_engine.checkpoint.collectives import Ranks
from megatron_run_engine.checkpoint.files import FileSystem
from megatron_run_engine.checkpoint.manifest import About, DataRecord, PluginRecord
from megatron_run_engine.checkpoint.reader import Reader
from megatron_run_engine.checkpoint.saving import Retention, Saver
from megatron_run_engine.checkpoint.shard_file import DTYPES
from megatron_run_engine.checkpoint.step_folder import Checkpoints

T = TypeVar("T")
RUN = "0123456789abcdef"
#: Logical tensors: name -> field -> values.
State = Mapping[str, Mapping[str, Tensor]]


class Alone:
    """A world of one rank."""

    rank, size = 0, 1

    def gather(self, text: str) -> Sequence[str]:
        return [text]

    def broadcast(self, text: str) -> str:
        return text


def about(step: int, **more: Any) -> About:
    """What is said of a step beside its tensors."""
    plugin = PluginRecord(name="adamw", distribution="megatron-run-core", version="0.1.0", state_version=1)
    said: dict[str, Any] = {
        "step": step,
        "run": RUN,
        "time": "2026-11-21T09:00:00+0000",
        "counters": {"step": step, "samples": 8 * step},
        "scaler": {"scale": 65536.0, "good_steps": 3},
        "data": DataRecord(samples=100, sha256="0" * 64),
        "plugins": {"optimizer": (plugin,)},
        "versions": {"torch": "2.13.0"},
        "topology": {"world": 1, "tensor": 1},
        "config": "1" * 64,
        "identity": {"train.lr": 1e-3},
    }
    return About(**(said | more))


def random_values(draw: random.Random, shape: Sequence[int], dtype: str = "F32") -> Tensor:
    """Random bits: every value that the type has, NaNs of every kind among them; for booleans 0 and 1."""
    width = torch.empty((), dtype=DTYPES[dtype]).element_size()
    raw = torch.frombuffer(bytearray(draw.randbytes(max(1, prod(shape)) * width)), dtype=torch.uint8)
    if dtype == "BOOL":
        raw = raw & 1
    return raw.view(DTYPES[dtype])[: prod(shape)].reshape(tuple(shape))


def random_state(seed: int, tensors: int = 3) -> State:
    """A few logical tensors of random shapes, each with weights, a moment of some type, and a step without shape."""
    draw = random.Random(seed)
    state = {}
    for index in range(tensors):
        shape = [draw.randint(1, 7) for _ in range(draw.randint(1, 3))]
        state[f"layers.{index}.weight"] = {
            "master": random_values(draw, shape),
            "exp_avg": random_values(draw, shape, draw.choice(sorted(DTYPES))),
            "step": random_values(draw, (), "F32"),
        }
    return state


def cut(draw: random.Random, box: Box, pieces: int) -> list[Box]:
    """Cut ``box`` into about so many boxes, by planes at random places."""
    longest = max((size for size in box.sizes), default=1)
    if pieces < 2 or longest < 2:
        return [box]
    axis = draw.choice([axis for axis, size in enumerate(box.sizes) if size > 1])
    at = draw.randint(1, box.sizes[axis] - 1)
    low, high = list(box.sizes), list(box.sizes)
    low[axis], high[axis] = at, box.sizes[axis] - at
    starts = list(box.starts)
    starts[axis] += at
    share = draw.randint(1, pieces - 1)
    return [
        *cut(draw, Box(box.starts, tuple(low)), share),
        *cut(draw, Box(tuple(starts), tuple(high)), pieces - share),
    ]


def dealt(seed: int, state: State, world: int) -> list[list[StatePiece]]:
    """Every field of every tensor in pieces, dealt to ``world`` ranks: by rank."""
    draw = random.Random(seed)
    hands: list[list[StatePiece]] = [[] for _ in range(world)]
    for name, fields in state.items():
        for field_name, values in fields.items():
            whole = Box((0,) * values.ndim, tuple(values.shape))
            for box in cut(draw, whole, 4):
                part = values[box.within(whole)]
                draw.choice(hands).append(StatePiece(name, field_name, box.starts, box.sizes, part))
    return hands


def shapes_of(state: State) -> dict[str, tuple[int, ...]]:
    """The global shapes of the logical tensors."""
    return {name: tuple(fields["master"].shape) for name, fields in state.items()}


def save_alone(path: Path, step: int, state: State, *, files: FileSystem | None = None, keep: int = 2) -> Checkpoints:
    """Save ``state`` as one rank does that holds all of it, whole."""
    checkpoints = Checkpoints(path)
    (pieces,) = dealt(0, state, 1)
    Saver(checkpoints, Alone(), RUN, Retention(keep), files).save(about(step), pieces, shapes_of(state))
    return checkpoints


def async_saver(path: Path, *, files: FileSystem | None = None, keep: int = 2) -> AsyncSaver:
    """What saves into ``path`` out of a copy, as one rank does that holds everything."""
    return AsyncSaver(Saver(Checkpoints(path), Alone(), RUN, Retention(keep), files), Staging(torch.device("cpu")))


def save_async(saver: AsyncSaver, step: int, state: State) -> None:
    """Start to save ``state``; before it can be on the disk its values are others."""
    changing = {name: {each: values.clone() for each, values in fields.items()} for name, fields in state.items()}
    (pieces,) = dealt(0, changing, 1)
    saver.start(about(step), pieces, shapes_of(state))
    for values in (values for fields in changing.values() for values in fields.values()):
        values.view(-1).view(torch.uint8).fill_(7)


def read_all(checkpoints: Checkpoints, step: int) -> State:
    """Everything that was saved at ``step``, verified."""
    manifest = checkpoints.verify(step)
    reader = Reader(checkpoints.folder(step), manifest)
    return {
        name: {
            field_name: reader.read(name, field_name, (0,) * len(record.shape), record.shape)
            for field_name, record in fields.items()
        }
        for name, fields in manifest.tensors.items()
    }


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have one type, one shape, and the same bits."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    raw = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(*raw)


def same_state(first: State, second: State) -> bool:
    """Whether two states have the same tensors with the same fields of the same bits."""
    if {name: set(fields) for name, fields in first.items()} != {name: set(fields) for name, fields in second.items()}:
        return False
    return all(same_bits(values, second[name][each]) for name in first for each, values in first[name].items())


@dataclass
class Table:
    """Where the threads of a test meet, one for each rank."""

    world: int
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.texts = [""] * self.world
        self._barrier = threading.Barrier(self.world)

    def exchange(self, rank: int, text: str) -> list[str]:
        """Everybody's text, by rank."""
        self.texts[rank] = text
        self._barrier.wait(10)
        texts = list(self.texts)
        self._barrier.wait(10)
        return texts


@dataclass
class ThreadRank:
    """One of several ranks that are threads."""

    rank: int
    table: Table

    @property
    def size(self) -> int:
        """How many there are."""
        return self.table.world

    def gather(self, text: str) -> Sequence[str]:
        """On rank 0 the texts of all ranks."""
        texts = self.table.exchange(self.rank, text)
        return texts if self.rank == 0 else ()

    def broadcast(self, text: str) -> str:
        """Rank 0's text."""
        return self.table.exchange(self.rank, text)[0]


def on_threads(world: int, work: Callable[[Ranks], T]) -> list[T | Exception]:
    """What ``work`` returns or raises on each of ``world`` ranks."""
    table = Table(world)

    def attempt(rank: int) -> T | Exception:
        try:
            return work(ThreadRank(rank, table))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(attempt, range(world)))
