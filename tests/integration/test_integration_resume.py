"""What one shape of ranks saved another loads: every value of weights and moments bit for bit, and the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from megatron_run.checkpoint.boxes import Box, cover_fault
from megatron_run.checkpoint.reader import Reader
from megatron_run.checkpoint.step_folder import Checkpoints
from tests.support.ranks import run_ranks
from tests.support.resuming import SMALL, attempt, only_step
from tests.support.saved_steps import same_bits
from tests.support.training import found_once

pytestmark = pytest.mark.multiproc

#: (tensor, pipeline, data): every way in which four ranks share the work by one or two axes.
SHAPES = ((1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 1))
Shape = tuple[int, int, int]
STEPS, SAVED = 4, 2


@dataclass
class Loaded:
    """What one rank held when it had loaded a step, before it went on.

    ``boxes`` are those of its state by (name, field), ``wrong`` what did not have the bits that were saved. ``losses``
    are those of the steps after.
    """

    boxes: dict[tuple[str, str], list[Box]]
    wrong: list[str]
    samples: int
    losses: dict[int, float]


def settings(shape: Shape) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The configuration of ``shape`` and the plugins that serve it."""
    tensor, pipeline, _ = shape
    sets = {**SMALL, "model.num_layers": 4, "train.steps": STEPS, "checkpoint.interval": 0}
    sets["data.vocab_size"] = 200  # both tensor ranks hold some of it, and padding
    sets |= {"parallel.tensor": tensor, "parallel.pipeline": pipeline}
    layers = ("parallel-layer=tensor",) if tensor > 1 else ()
    if pipeline == 1:
        return sets, layers
    if tensor == 1:  # two chunks on each stage
        return {**sets, "parallel.chunks": 2, "train.global_batch_size": 4}, (*layers, "schedule=interleaved")
    return sets, (*layers, "schedule=1f1b")


def train_and_reshape(rank: int, world: int, folder: str, optimizer: str) -> Mapping[Any, Any]:
    """Train each shape to its second step; then load what each saved into each other one, and go on."""
    import torch.distributed as dist

    root, found = Path(folder), {}
    with found_once():
        for shape in SHAPES:
            sets, plugins = settings(shape)
            ran = attempt(root / str(shape), sets, (*plugins, optimizer), stop_after=SAVED, rank=rank, world=world)
            assert list(ran.numbers) == ([1, 2] if rank == 0 else [])
        for source, target in permutations(SHAPES, 2):
            place = root / f"{source}-{target}"
            if rank == 0:
                only_step(root / str(source), SAVED, place)
            dist.barrier()
            found[source, target] = load(rank, world, place, target, optimizer)
    return found


def load(rank: int, world: int, folder: Path, shape: Shape, optimizer: str) -> Loaded:
    saved = Checkpoints(folder / "checkpoints")
    reader = Reader(saved.folder(SAVED), saved.manifest(SAVED))
    boxes: dict[tuple[str, str], list[Box]] = {}
    wrong: list[str] = []

    def look(assembly: Any) -> None:
        for piece in assembly.optimizer.iter_state():
            boxes.setdefault((piece.name, piece.field), []).append(Box(piece.starts, piece.sizes))
            if not same_bits(piece.tensor, reader.read(*piece[:4])):
                wrong.append(f"{piece.field} of {piece.name}{boxes[piece.name, piece.field][-1]}")
        for parameter, info in (item for described in assembly.infos for item in described.items()):
            for part in info.parts:
                rows = parameter.detach()[part.local.start : part.local.stop]
                starts = (part.start, part.column, 0)[: rows.ndim]
                if not same_bits(rows, reader.read(part.name, "master", starts, tuple(rows.shape))):
                    wrong.append(f"parameter {part.name}")

    sets, plugins = settings(shape)
    ran = attempt(folder, sets, (*plugins, optimizer), rank=rank, world=world, number=2, loaded=look)
    samples = saved.manifest(SAVED).about.counters["samples"]
    return Loaded(boxes, wrong, samples, {step: numbers["loss"] for step, numbers in ran.numbers.items()})


@pytest.mark.parametrize("optimizer", ["optimizer=adamw", "optimizer=zero1"])
def test_twelve_pairs_of_shapes_hold_the_same_bits_and_go_on_alike(optimizer: str, tmp_path: Path) -> None:
    ranks = run_ranks(train_and_reshape, 4, str(tmp_path), optimizer, timeout=110)
    losses = [found.losses for found in ranks[0].values()]
    for source, target in permutations(SHAPES, 2):
        found = [rank[source, target] for rank in ranks]
        assert not [wrong for each in found for wrong in each.wrong], f"{source} to {target}"
        saved = Checkpoints(tmp_path / str(source) / "checkpoints").manifest(SAVED)
        for name, fields in saved.tensors.items():
            for field, record in fields.items():
                held = [box for each in found for box in each.boxes.get((name, field), [])]
                assert not cover_fault(record.shape, held), f"{field} of {name}, {source} to {target}"
        assert list(found[0].losses) == [3, 4]
    for step in (3, 4):
        of_step = [each[step] for each in losses]
        assert max(of_step) - min(of_step) < 1e-5
