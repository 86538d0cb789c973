"""Trains inside a test: every rank resolves the same request, trains, and returns what it saw."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from megatron_run.config.request import Request
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.witness import Witness


@dataclass
class Seen:
    """What one rank saw: losses and gradient norms by step (rank 0), first gradients by name, actions, memory.

    ``judged`` are the metrics of evaluations beside the loss. By step: ``executed`` actions, ``peaks`` of activations
    in flight, the most sent tensors ``held`` at once, and the messages ``left`` when the step had ended. ``plan`` is
    what was planned, for this rank's ``stage``; ``captured`` what was said of graphs, and ``weights`` a digest of all
    weights after the last step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    judged: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    executed: list[list[str]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    plan: Any = None
    stage: int = 0
    captured: list[Any] = field(default_factory=list)
    weights: str = ""

    @property
    def planned(self) -> list[str]:
        """The actions that the plan has for this rank, but S, which computes nothing."""
        return [str(action) for action in self.plan.lists[self.stage] if action.op != "S"]


def learned_alike(found: Sequence[Seen], expected: Seen) -> None:
    """Assert that the ranks ``found`` learned what one process did, up to the order of sums."""
    np.testing.assert_allclose(found[0].losses, expected.losses, rtol=2e-6)
    np.testing.assert_allclose(found[0].norms, expected.norms, rtol=1e-5)
    np.testing.assert_allclose(found[0].validation, expected.validation, rtol=2e-6)


def learned_the_same(found: Seen, expected: Seen) -> None:
    """Assert that a run learned what another did, bit for bit."""
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert found.validation == expected.validation


def train(world: int, *, sets: tuple[str, ...] = (), plugins: tuple[str, ...] = (), timeout: float = 200) -> list[Seen]:
    """Train ``preset:tiny`` with these settings on ``world`` ranks; one :class:`Seen` a rank."""
    request = Request(configs=("preset:tiny",), sets=sets, plugins=plugins, nproc=world)
    return run_ranks(train_here, world, request.to_json(), timeout=timeout)


def train_many(world: int, requests: Sequence[Request], *, timeout: float = 280) -> list[list[Seen]]:
    """Train each request on ``world`` ranks, one after the other in the same processes: for each, one :class:`Seen` a
    rank. What needs no world is shared between two processes.
    """
    texts = [request.to_json() for request in requests]
    if world == 1:
        halves = run_ranks(_train_alone, 2, texts, timeout=timeout)
        return [[halves[index % 2][index // 2]] for index in range(len(texts))]
    by_rank = run_ranks(train_in_turn, world, texts, timeout=timeout)
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


def _train_alone(rank: int, world: int, requests: list[str]) -> list[Seen]:
    with found_once():
        return [train_here(0, 1, request) for request in requests[rank::world]]


def train_in_turn(rank: int, world: int, requests: list[str]) -> list[Seen]:
    """Train each of ``requests`` on this rank."""
    with found_once(), kept_groups():
        return [train_here(rank, world, request) for request in requests]


def enter_new_world(rank: int, world: int, store: str) -> None:
    """Leave the world of the run before, together, for one that meets at the file ``store``."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(minutes=5)
    )


@contextmanager
def kept_groups() -> Iterator[None]:
    """Within: runs of these ranks share process groups, whose threads would slow down the runs after them.

    A thread of gloo's looks for work a hundred times a second, and a group has three.
    """
    import torch.distributed as dist

    from megatron_run_engine.runtime.comm import groups
    from megatron_run_engine.training import build

    made: dict[tuple[tuple[tuple[int, ...], ...], int], Any] = {}
    asked: Counter[tuple[tuple[int, ...], ...]] = Counter()

    def create(partition: tuple[tuple[int, ...], ...], rank: int, timeout: timedelta) -> Any:
        key = partition, asked[partition]
        asked[partition] += 1
        if key not in made:
            groups = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in partition if len(ranks) > 1}
            made[key] = next((group for ranks, group in groups.items() if rank in ranks), None)
        return made[key]

    def create_groups(*arguments: Any) -> Any:
        asked.clear()
        return create_all(*arguments)

    create_all = groups.create_groups
    with mock.patch.object(groups, "_create", create), mock.patch.object(build, "create_groups", create_groups):
        yield


def train_here(rank: int, world: int, request: str) -> Seen:
    """Train on this rank of a process group that exists already.

    The last step is saved by ``make grid`` alone: nobody reads it, and it takes a fifth of a run this short.
    """
    from megatron_run.contracts import CaptureMetrics, EvalMetrics, Observer, StepMetrics
    from megatron_run_engine.training.state.checkpointing import Checkpointing

    seen, assemblies = Seen(), list[Any]()

    class WatchGraphs(Observer):
        def on_capture(self, metrics: CaptureMetrics) -> None:
            seen.captured.append(metrics)

    class Watch(WatchGraphs):
        def on_step_end(self, metrics: StepMetrics) -> None:
            seen.losses.append(metrics.loss if metrics.loss is not None else float("nan"))
            seen.norms.append(metrics.grad_norm if metrics.grad_norm is not None else float("nan"))

        def on_eval_end(self, metrics: EvalMetrics) -> None:
            seen.validation.append(metrics.loss)
            seen.judged.append(dict(metrics.extra))

    def built(run: Any, assembly: Any) -> None:
        assemblies.append(assembly)
        seen.plan, seen.stage = run.plans[max(run.plans)], assembly.context.topology.stage
        _record_actions(assembly, seen)
        _record_first_gradients(assembly, seen)

    def started(first: int) -> list[Any]:
        return [Watch() if rank == 0 else WatchGraphs()]

    with ExitStack() as within:
        folder = within.enter_context(shared_folder(rank, world))
        if os.environ.get("WHOLE_PRODUCT", "") != "1":
            within.enter_context(mock.patch.object(Checkpointing, "after_step", return_value=[]))
        train_in_process(Request.from_json(request), rank, world, folder, built=built, started=started)
    seen.weights = _digest(*assemblies)
    return seen


def train_in_process(
    request: Request,
    rank: int,
    world: int,
    folder: Path,
    *,
    built: Callable[[Any, Any], None],
    started: Callable[[int], list[Any]],
    stop: Any = None,
    number: int = 1,
) -> Any:
    """Train this rank's part of a run in attempt ``number`` of the run ``folder``; the exit code.

    ``built`` is called with the resolved run and what it is made of; ``started`` with the first step, and returns the
    observers. ``stop`` is the request to stop.
    """
    from megatron_run.planning import resolve
    from megatron_run_engine.run_folder import RunFolder
    from megatron_run_engine.runtime.world import StopRequest, World
    from megatron_run_engine.training.build import build
    from megatron_run_engine.training.observers import Observers
    from megatron_run_engine.training.trainer import train_rank

    run = resolve(request)

    def watched_build(*arguments: Any) -> Any:
        assembly = build(*arguments)
        built(run, assembly)
        return assembly

    def start(*arguments: Any) -> Observers:
        return Observers([("watch", observer) for observer in started(arguments[3].first_step)], mock.Mock())

    with (
        mock.patch("megatron_run_engine.training.trainer.build", watched_build),
        mock.patch("megatron_run_engine.training.trainer.start_observers", start),
    ):
        return train_rank(run, World(rank, world), RunFolder(folder, number, rank), stop or StopRequest())


@contextmanager
def shared_folder(rank: int, world: int) -> Iterator[Path]:
    """A folder that all ranks see, gone when rank 0 leaves."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as mine:
        found = [mine]
        if world > 1:
            dist.broadcast_object_list(found)
        yield Path(found[0])


def _digest(assembly: Any) -> str:
    """Of this rank's weights, bit for bit."""
    import torch

    found = sha256()
    for parameter, _ in assembly.values():
        found.update(parameter.detach().clone().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _record_actions(assembly: Any, seen: Seen) -> None:
    """Keep what was computed in each training step, not by the executor's word, and what its messenger held."""
    execute, messenger = assembly.executor.run, assembly.executor._messenger
    witness = Witness(assembly.chunks, assembly.context.gradients)
    send = messenger.send
    held = [0]

    def counted_send(*arguments: Any) -> None:
        send(*arguments)
        held.append(len(messenger._sent))

    def run(program: Any, inputs: Any, clock: Any = None) -> Any:
        del held[1:], witness.actions[:]
        record = execute(program, inputs, clock)
        if inputs.seed is not None:
            seen.executed.append([str(action) for action in witness.actions])
            seen.peaks.append(record.peak_in_flight)
            seen.held.append(max(held))
        seen.left.append(sum(map(len, (messenger._sent, messenger._posted, messenger._local))))
        return record

    messenger.send, assembly.executor.run = counted_send, run


def _record_first_gradients(assembly: Any, seen: Seen) -> None:
    """Keep the reduced gradients of the first step that are whole, by the logical tensors' names."""
    import torch

    from megatron_run_engine.runtime.gradients import main_grad
    from megatron_run_engine.runtime.parameter_init import has_memory, trained

    unscale = assembly.optimizer.unscale_

    def record(factor: Any) -> Any:
        if not seen.gradients:
            for described in assembly.infos:
                for parameter, info in trained(described).items():
                    for part in info.parts if has_memory(main_grad(parameter)) else ():
                        rows = main_grad(parameter)[part.local.start : part.local.stop]
                        seen.gradients[part.name] = rows.to(
                            torch.promote_types(rows.dtype, torch.float32), copy=True
                        ).numpy()
        return unscale(factor)

    assembly.optimizer.unscale_ = record
