"""Many runs of ``preset:tiny`` on ranks that are started once, with what their optimizers hold when they end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from megatron_run.config.request import Request
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.training import kept_groups, train_here

Array = NDArray[Any]


class Planted(NamedTuple):
    """A value that is not finite, in ``step`` (from 1) and in the first parameter's gradient of ``rank``.

    It lies ``where`` between the beginning of that gradient, 0, and its end, 1.
    """

    rank: int
    step: int
    where: float


@dataclass(frozen=True)
class Case:
    """A run, with gradients that are spoiled on their way."""

    sets: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    planted: tuple[Planted, ...] = ()


@dataclass
class Held:
    """What one rank saw, and what it holds in the end.

    By step: ``losses`` and ``norms`` (on rank 0; NaN where there is none), ``found_inf``, the ``scales`` before and
    after it. ``weights`` are digests of this rank's parameters before each step and in the end. ``pieces`` of the
    optimizer's state are (name, field, starts, values). ``memory`` is what it says of its bytes, ``storages`` what was
    found by walking its objects. By step too: how many gradients of parameters had arrived when each bucket left
    (``departures``), and in all (``arrivals``).
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    found_inf: list[bool] = field(default_factory=list)
    scales: list[tuple[float, float]] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    pieces: list[tuple[str, str, tuple[int, ...], Array]] = field(default_factory=list)
    memory: Mapping[str, int] = field(default_factory=dict)
    storages: int = 0
    departures: list[list[int]] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)


def run_cases(world: int, cases: Sequence[Case]) -> list[list[Held]]:
    """Run every case on the same ``world`` ranks, one after the other: by case, by rank."""
    by_rank = run_ranks(_run_cases, world, tuple(cases), timeout=40 + 15 * len(cases))  # of a slow machine
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


def state_of(ranks: Iterable[Held]) -> dict[tuple[str, str], Array]:
    """Whole tensors by (name, field); every value is given exactly once."""
    pieces: dict[tuple[str, str], list[tuple[tuple[int, ...], Array]]] = {}
    for name, label, starts, values in (piece for held in ranks for piece in held.pieces):
        pieces.setdefault((name, label), []).append((starts, values))
    whole: dict[tuple[str, str], Array] = {}
    for key, boxes in pieces.items():
        ends = np.array([np.add(starts, values.shape) for starts, values in boxes])
        tensor = np.full(ends.max(0) if ends.size else (), np.nan, boxes[0][1].dtype)
        for starts, values in boxes:
            place = tuple(map(slice, starts, np.add(starts, values.shape)))
            assert np.isnan(tensor[place]).all(), f"{key} is given twice at {starts}"
            tensor[place] = values
        assert not np.isnan(tensor).any(), f"nobody gives all of {key}"
        whole[key] = tensor
    return whole


def _run_cases(rank: int, world: int, cases: Sequence[Case]) -> list[Held]:
    with found_once(), kept_groups():
        return [_run_case(rank, world, case) for case in cases]


def _run_case(rank: int, world: int, case: Case) -> Held:
    from megatron_run_engine.training.build import build

    held, assemblies = Held(), list[Any]()

    def watched_build(*arguments: Any) -> Any:
        assemblies.append(build(*arguments))
        _watch_steps(assemblies[0], held, {each.step: each for each in case.planted if each.rank == rank})
        return assemblies[0]

    sets = ("eval.interval=0", "eval.batches=1", *case.sets)
    request = Request(configs=("preset:tiny",), sets=sets, plugins=case.plugins, nproc=world)
    with mock.patch("megatron_run_engine.training.build.build", watched_build):
        seen = train_here(rank, world, request.to_json())
    held.losses, held.norms = seen.losses, seen.norms
    _look(assemblies[0], held)
    return held


def _watch_steps(assembly: Any, held: Held, planted: Mapping[int, Planted]) -> None:
    """Note the scale and the weights of each step; spoil its gradient once this rank's microbatches are done."""
    from megatron_run_engine.runtime.gradients import main_grad

    optimizer, scaler = assembly.optimizer, assembly.scaler
    zero_grad, update = optimizer.zero_grad, scaler.update
    send, gradients = optimizer._reducer._send_bucket, assembly.context.gradients
    arrived, arrivals = gradients._arrived, [0]

    def noting_zero_grad() -> None:
        held.weights.append(_digest(assembly))
        held.departures.append([])
        arrivals[0] = 0
        zero_grad()

    def counting_arrival(parameter: Any) -> None:
        arrivals[0] += 1
        arrived(parameter)

    def noting_update(found_inf: Any) -> None:
        held.arrivals.append(arrivals[0])
        held.found_inf.append(found_inf.item() > 0)
        before = scaler.scale.item()
        update(found_inf)
        held.scales.append((before, scaler.scale.item()))

    def spoiling_send(bucket: Any) -> Any:
        victim = next(iter(assembly.infos[0]))
        if (spoiled := planted.get(len(held.weights))) and victim in bucket.starts:
            gradient = main_grad(victim).view(-1)
            gradient[int(spoiled.where * len(gradient))] = float("inf")
        held.departures[-1].append(arrivals[0])
        return send(bucket)

    optimizer.zero_grad, scaler.update = noting_zero_grad, noting_update
    optimizer._reducer._send_bucket, gradients._arrived = spoiling_send, counting_arrival


def _digest(assembly: Any) -> str:
    """Of all weights of this rank, once they have arrived."""
    digest = hashlib.sha256()
    for parameter, _ in assembly.values():
        digest.update(parameter.detach().clone().float().numpy().tobytes())
    return digest.hexdigest()


def _look(assembly: Any, held: Held) -> None:
    """Keep what the optimizer holds in the end."""
    held.weights.append(_digest(assembly))
    held.memory = assembly.optimizer.memory()
    held.storages = _storages(assembly)
    for piece in assembly.optimizer.iter_state():
        held.pieces.append((piece.name, piece.field, piece.starts, piece.tensor.detach().numpy().copy()))


def _storages(assembly: Any) -> int:
    """Bytes of the different storages of parameters, their gradients, and all tensors that the optimizer reaches."""
    from megatron_run_engine.runtime.gradients import main_grad

    tensors = [tensor for infos in assembly.infos for p in infos for tensor in (p, main_grad(p))]
    tensors += _tensors_of(assembly.optimizer, set())
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _tensors_of(thing: Any, seen: set[int]) -> Iterator[Any]:
    """Every tensor that an object's attributes, and containers in them, lead to."""
    import torch

    if id(thing) in seen or isinstance(thing, (str, bytes, type, torch.dtype)):
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    inside: list[Any] = []
    if isinstance(thing, Mapping):
        inside = [*thing.keys(), *thing.values()]
    elif isinstance(thing, (list, tuple, set)):
        inside = list(thing)
    elif type(thing).__module__.startswith(("megatron_run", "torch.optim")):
        inside = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    for part in inside:
        yield from _tensors_of(part, seen)
