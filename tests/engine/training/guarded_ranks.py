"""What the guards of several ranks find when one of them goes wrong; started once, in one world."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Flipped replicas, in each of two worlds: four copies of the whole model, and two tensor-parallel ones of two stages.
FLIPS = 20
#: A layer for each of two stages, and steps of some milliseconds.
TINY = ("model.num_layers=2", "model.hidden_size=16", "train.sequence_length=8", "eval.batches=1")


def flipped_replicas(rank: int, world: int, folder: str) -> dict[str, Any]:
    """For each trial (what was flipped, what this rank was told)."""
    from tests.support.training_bench import Bench

    tied = ("model.tie_embeddings=true", "parallel.tensor=2", "parallel.pipeline=2")
    split = Bench(
        Path(folder), *TINY, *tied, plugins=("parallel-layer=tensor", "schedule=1f1b"), rank=rank, world=world
    )
    whole = Bench(
        Path(folder), *TINY, "optimizer.use=zero1", "train.steps=1", "checkpoint.interval=0", rank=rank, world=world
    )
    whole.train()  # the last gather of its parameters may still be on its way
    return {
        "whole": list(_trials(whole, rank, world, range(world))),
        "copies": list(_trials(split, rank, world, (0, 1))),
        "split": list(_trials(split, rank, world, (2, 3), wanted="embedding.word.weight")),
        "equal": [_compare(bench) for bench in (whole, split)],
    }


def _trials(bench: Any, rank: int, world: int, ranks: Any, wanted: str = "") -> Iterator[tuple[int, str, Any]]:
    """Flip one bit of one value of one tensor, which all ranks of ``ranks`` hold whole, on one of them."""
    import torch

    names = [info.name for parameter, info in bench.infos.items() if not info.tie and _is_whole(parameter, info)]
    for trial in range(FLIPS):
        dice = random.Random(trial)
        victim, name = dice.choice(list(ranks)), wanted or dice.choice(names if rank in ranks else ["none"])
        torch.distributed.barrier()
        with _flipped(bench, name, dice) if rank == victim else _nothing():
            yield victim, name, _compare(bench)


def _is_whole(parameter: Any, info: Any) -> bool:
    return all(part.shape == (len(part.local), *parameter.shape[1:]) for part in info.parts)


def _compare(bench: Any) -> Any:
    from megatron_run_engine.training.health.replicas import compare_replicas

    bench.assembly.optimizer.finish_param_sync()
    return compare_replicas(bench.assembly, bench.trainer._guards._ranks, deterministic=True)


@contextmanager
def _flipped(bench: Any, name: str, dice: random.Random) -> Iterator[None]:
    import torch

    (parameter,) = [parameter for parameter, info in bench.infos.items() if info.name == name]
    bits = parameter.detach().view(-1).view(torch.int32)
    index, mask = dice.randrange(len(bits)), 1 << dice.randrange(31)
    bits[index] ^= mask
    yield
    bits[index] ^= mask


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def guarded_pipeline(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Two stages of two replicas: a loss that is not finite on one rank alone, then a spike; what this rank did."""
    from dataclasses import asdict

    from tests.support.training_bench import Bench

    sets = ("parallel.pipeline=2", "train.micro_batch_size=1", "train.steps=12", "eval.interval=0")
    guards = ("guard.spike=rewind", "guard.spike_window=8", "checkpoint.interval=4")
    bench = Bench(Path(folder), *TINY, *sets, *guards, plugins=("schedule=1f1b",), rank=rank, world=world)

    def change(begun: int, microbatch: int, loss: Any) -> Any:
        if rank == 3 and begun == 2 and microbatch == 2:
            return loss - float("inf")
        return loss * 9 if begun == 11 else loss

    bench.spoil_losses(change)
    bench.train()
    steps = [(step.step, step.skipped) for step in bench.watch.steps]
    return {"said": bench.said, "steps": steps, "read": bench.read, "progress": asdict(bench.trainer._progress)}


def slow_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Four replicas of which rank 2 is slow in its forward; what this rank said."""
    from time import sleep

    from tests.support.training_bench import Bench

    sets = ("train.steps=7", "eval.interval=0", "checkpoint.interval=0", "guard.straggler_interval=4")
    bench = Bench(Path(folder), *TINY, *sets, rank=rank, world=world)
    if rank == 2:
        chunk: Any = bench.assembly.chunks[0]
        chunk.register_forward_pre_hook(lambda *_: sleep(0.1))
    bench.train()
    return {"stragglers": bench.said}


def other_samples(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Four tensor-parallel ranks of which rank 2 is fed another token from step 3 on; what this rank was told."""
    from dataclasses import replace

    from megatron_run.errors import GuardError
    from tests.support.training_bench import Bench

    sets = ("train.steps=6", "eval.interval=0", "checkpoint.interval=0", "guard.replica_interval=2")
    split = ("model.num_heads=4", "parallel.tensor=4", "parallel.pipeline=1", "parallel.data=1")
    bench = Bench(Path(folder), *TINY, *sets, *split, plugins=("parallel-layer=tensor",), rank=rank, world=world)
    loader: Any = bench.trainer._loader
    honest = loader.training

    def training(dataset: Any, step: int, consumed: int) -> Any:
        def microbatch(index: int) -> Any:
            loaded = load(index)
            tokens = loaded.fields["tokens"].clone()
            tokens[0, 0] += rank == 2 and step >= 3 and index == 1
            return replace(loaded, fields={**loaded.fields, "tokens": tokens})

        load = honest(dataset, step, consumed)
        return microbatch

    loader.training = training
    try:
        bench.train()
    except GuardError as error:
        return {"fed": str(error)}
    return {"fed": ""}


def all_of_it(rank: int, world: int, folder: str) -> dict[str, Any]:
    """All of these, in one world."""
    seen: dict[str, Any] = {}
    for work in (guarded_pipeline, slow_rank, flipped_replicas, other_samples):
        own = Path(folder) / work.__name__
        own.mkdir(exist_ok=True)
        seen |= work(rank, world, str(own))
    return seen
