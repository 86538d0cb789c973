"""Runs of several shapes of ranks that load what each other saved, in one start of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_run_engine.checkpoint.boxes import Box, cover_fault
from megatron_run_engine.checkpoint.reader import Reader
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.data.batches import sample_index
from tests.support.resuming import SMALL, only_step
from tests.support.saved_steps import same_bits

#: (tensor, pipeline, data): every way in which four ranks share the work by one or two axes.
SHAPES = ((1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 1))
#: The same where what is left of four ranks splits samples: none, two or four of them, and two with tensor ranks.
SPLIT_SHAPES = ((1, 1, 4), (1, 1, 2), (1, 1, 1), (2, 1, 1))
Shape = tuple[int, int, int]
RANKS, STEPS, SAVED, BATCH = 4, 4, 2, 4
#: Samples whose order is looked at, after the step that was saved.
NEXT = 1000


@dataclass
class Loaded:
    """What one rank held when it had loaded what another shape had saved.

    ``boxes`` are those of its state by (name, field), ``wrong`` what did not have the bits that were saved, and
    ``samples`` those that it would train on next, by their place in the stream.
    """

    boxes: dict[tuple[str, str], list[Box]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    samples: dict[int, int] = field(default_factory=dict)


@dataclass
class Found:
    """By source and target shape what was loaded, and by target the losses of the steps after the last loading."""

    loaded: dict[tuple[Shape, Shape], Loaded] = field(default_factory=dict)
    losses: dict[Shape, list[float]] = field(default_factory=dict)


class Asked(Sequence[dict[str, Any]]):
    """A dataset as long as ``dataset`` that notes which samples are asked for."""

    in_order = False

    def __init__(self, dataset: Any) -> None:
        self._sample = {name: np.zeros_like(values) for name, values in dataset[0].items()}
        self._length, self.indices = len(dataset), list[int]()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        self.indices.append(index)
        return self._sample


def settings(shape: Shape) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The configuration of ``shape`` and the plugins that serve it."""
    tensor, pipeline, data = shape
    context = RANKS // (tensor * pipeline * data)
    sets = {**SMALL, "model.num_layers": 4, "train.steps": STEPS, "checkpoint.interval": 0}
    sets["data.vocab_size"] = 200  # both tensor ranks hold some of it, and padding
    sets |= {"parallel.tensor": tensor, "parallel.pipeline": pipeline, "train.global_batch_size": BATCH}
    sets |= {"parallel.context": context}
    names = ["tensor" if tensor > 1 else "dense", *["context"] * (context > 1)]
    layers = (f"parallel-layer={'+'.join(names)}",)
    if pipeline == 1:
        return sets, layers
    if tensor == 1:  # two chunks on each stage
        return {**sets, "parallel.chunks": 2}, (*layers, "schedule=interleaved")
    return sets, (*layers, "schedule=1f1b")


class Member:
    """One rank of a run of ``shape``, which is built once, trains, and loads again and again."""

    def __init__(self, rank: int, world: int, shape: Shape, optimizer: str) -> None:
        from megatron_run.config.request import Request
        from megatron_run.planning import resolve
        from megatron_run_engine.run_folder import RunFolder
        from megatron_run_engine.runtime.world import StopRequest, World
        from megatron_run_engine.training.build import build
        from megatron_run_engine.training.trainer import Trainer

        sets, plugins = settings(shape)
        request = Request(("preset:tiny",), nproc=world, plugins=(*plugins, f"optimizer={optimizer}"), values=sets)
        self.run, self._rank = resolve(request), rank
        self.assembly = build(self.run, World(rank, world))
        self._trainer = Trainer(self.run, self.assembly, RunFolder(Path("unused"), 1, rank), StopRequest())

    def enter(self, folder: Path) -> None:
        """Go on in the run folder ``folder``: load what was saved there, or start where there is nothing."""
        from megatron_run_engine.run_folder import RunFolder
        from megatron_run_engine.training.state.checkpointing import Checkpointing

        folder.mkdir(parents=True, exist_ok=True)
        run_folder, dataset = RunFolder(folder, 1, self._rank), self._trainer._dataset
        self._trainer._folder = run_folder
        self._trainer._checkpoints = Checkpointing(self.run, self.assembly, run_folder, dataset)
        self._trainer.resume()

    def train(self, stop_after: int) -> list[float]:
        """Train until step ``stop_after``, which is saved; the losses, on rank 0."""
        from megatron_run.contracts import Observer, StepMetrics
        from megatron_run.errors import ExitCode
        from megatron_run_engine.runtime.world import StopRequest
        from megatron_run_engine.training.observers import Observers

        losses: list[float] = []
        stop = self._trainer._stop = StopRequest()

        class Watch(Observer):
            def on_step_end(self, metrics: StepMetrics) -> None:
                assert metrics.loss is not None
                losses.append(metrics.loss)
                if metrics.step + 1 == stop_after:
                    stop.stop(ExitCode.SIGTERM)

        self._trainer.train(Observers([("watch", Watch())] if self._rank == 0 else [], mock.Mock()))
        return losses

    def samples(self) -> dict[int, int]:
        """The samples of its next steps by their place in the stream, as many as make NEXT over all ranks."""
        from megatron_run_engine.training.loader import BatchLoader

        asked, first = Asked(self._trainer._dataset), self._trainer._progress.samples
        feed, found = BatchLoader(self.run, self.assembly), dict[int, int]()
        for consumed in range(first, first + NEXT, BATCH):
            microbatch = feed.training(asked, 0, consumed)
            for index in range(BATCH // self.run.sizes.data):
                made = microbatch(index)
                found |= {consumed + made.sample0 + place: index for place, index in enumerate(asked.indices)}
                asked.indices.clear()
        return found

    def look(self, source: Path) -> Loaded:
        """What it holds, beside what was saved in the run folder ``source``."""
        saved, loaded = Checkpoints(source / "checkpoints"), Loaded(samples=self.samples())
        reader = Reader(saved.folder(SAVED), saved.manifest(SAVED))
        for piece in self.assembly.optimizer.iter_state():
            loaded.boxes.setdefault((piece.name, piece.field), []).append(Box(piece.starts, piece.sizes))
            if not same_bits(piece.tensor, reader.read(*piece[:4])):
                loaded.wrong.append(f"{piece.field} of {piece.name}{loaded.boxes[piece.name, piece.field][-1]}")
        for parameter, info in self.assembly.values():
            for part in info.parts:
                rows = parameter.detach()[part.local.start : part.local.stop]
                starts = (part.start, part.column, 0)[: rows.ndim]
                if not same_bits(rows, reader.read(part.name, "master", starts, tuple(rows.shape))):
                    loaded.wrong.append(f"parameter {part.name}")
        return loaded


def reshape(rank: int, world: int, root: Path, optimizer: str, shapes: Sequence[Shape]) -> Found:
    """Train each shape to its second step; then load what each saved into each other one, and at last go on."""
    import torch.distributed as dist

    found, members = Found(), {shape: Member(rank, world, shape, optimizer) for shape in shapes}
    for shape, member in members.items():
        member.enter(root / str(shape))
        assert len(member.train(SAVED)) == (SAVED if rank == 0 else 0)
    for source, target in permutations(members, 2):
        place = root / f"{source}-{target}"
        if rank == 0:
            only_step(root / str(source), SAVED, place)
        dist.barrier()
        members[target].enter(place)
        found.loaded[source, target] = members[target].look(place)
    found.losses = {shape: member.train(STEPS) for shape, member in members.items()}
    return found


def check_bits(root: Path, ranks: Sequence[Found], shapes: Sequence[Shape]) -> None:
    """Every shape has loaded all that every other saved under ``root``, bit for bit, and goes on as the others do."""
    assert list(ranks[0].loaded) == list(permutations(shapes, 2))
    for source, target in permutations(shapes, 2):
        loaded = [rank.loaded[source, target] for rank in ranks]
        assert not [wrong for each in loaded for wrong in each.wrong], f"{source} to {target}"
        saved = Checkpoints(root / str(source) / "checkpoints").manifest(SAVED)
        for name, fields in saved.tensors.items():
            for field_name, record in fields.items():
                held = [box for each in loaded for box in each.boxes.get((name, field_name), [])]
                assert not cover_fault(record.shape, held), f"{field_name} of {name}, {source} to {target}"
    losses = list(ranks[0].losses.values())
    assert np.ptp(losses, axis=0) == pytest.approx([0, 0], abs=1e-5)


def check_samples(ranks: Sequence[Found]) -> None:
    """The next samples of every shape, whatever it loaded, are those at the next places of the stream."""
    from megatron_run.planning import load_config

    sets, _ = settings(SHAPES[0])
    run = load_config("preset:tiny", sets={name: value for name, value in sets.items() if name.startswith("data.")})
    train = run.config.train
    length = len(run.one("data").create().dataset("train", sets["train.sequence_length"], train.seed))
    first = SAVED * BATCH
    expected = {place: sample_index(length, train.seed, place) for place in range(first, first + NEXT)}
    for pair in ranks[0].loaded:
        taken: dict[int, int] = {}
        for rank in ranks:
            mine = rank.loaded[pair].samples
            assert all(taken.setdefault(place, sample) == sample for place, sample in mine.items())
        assert taken == expected, pair
