"""State crosses layouts: what one rank or two saved, four go on from, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from megatron_run.contracts import Optimizer, StatePiece
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run_engine.runtime.comm import Groups, create_groups
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing.build_contexts import context_at
from megatron_run_testing.optimizer.alone import shapes
from megatron_run_testing.optimizer.bench import Bench, SavedState, mean_gradients
from tests.support.ranks import run_ranks

STEPS = 3
#: Whose gradients are averaged in every step, however many ranks there are.
MEAN_OF = 2


def create(name: str, context: BuildContext, rule: str) -> Optimizer:
    plugin = load(choose(scan(), "optimizer", name, "a test"), "a test")
    optimizer: Optimizer = plugin.with_options(plugin.options_model.model_validate({"rule": rule})).create(
        context=context
    )
    return optimizer


def bench(name: str, topology: Topology, groups: Groups, rule: str) -> Bench:
    context = context_at(topology, groups, dtype=torch.float32)
    return Bench(lambda made: create(name, made, rule), context)


def trained(made: Bench, steps: Sequence[int]) -> Bench:
    for step in steps:
        made.step(mean_gradients(step, MEAN_OF))
    return made


def pieces_on_ranks(rank: int, world: int, names: Sequence[str], rule: str) -> list[list[StatePiece]]:
    """What each of the optimizers ``names`` gives after some steps."""
    topology = Topology(Sizes(data=world), rank)
    groups = create_groups(topology, timedelta(seconds=30))
    return [
        numbers(trained(bench(name, topology, groups, rule), range(STEPS)).optimizer.iter_state()) for name in names
    ]


def numbers(pieces: Iterator[StatePiece]) -> list[Any]:
    """With arrays for tensors, which outlive their process."""
    return [piece._replace(tensor=piece.tensor.detach().numpy().copy()) for piece in pieces]  # type: ignore[arg-type]


def tensors(pieces: Sequence[Any]) -> list[StatePiece]:
    return [piece._replace(tensor=torch.as_tensor(piece.tensor)) for piece in pieces]


def go_on(rank: int, world: int, saved: Sequence[Sequence[Any]], rule: str) -> list[dict[str, Any]]:
    """The weights of a fresh zero1 that was given each of ``saved``, two steps later."""
    topology = Topology(Sizes(data=world), rank)
    groups = create_groups(topology, timedelta(seconds=30))
    weights = []
    for pieces in saved:
        fresh = bench("zero1", topology, groups, rule)
        fresh.optimizer.load_state(SavedState(tensors(pieces), shapes(fresh)).read)
        trained(fresh, range(STEPS, STEPS + 2))
        weights.append({name: value.numpy() for name, value in fresh.values().items()})
    return weights


@pytest.mark.multiproc
@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_four_ranks_go_on_from_what_one_or_two_saved(rule: str) -> None:
    alone = bench("adamw", Topology(Sizes(), 0), Groups(), rule)
    one = numbers(trained(alone, range(STEPS)).optimizer.iter_state())
    two = [
        [piece for pieces in by_rank for piece in pieces]
        for by_rank in zip(*run_ranks(pieces_on_ranks, 2, ("adamw", "zero1"), rule), strict=True)
    ]
    expected = trained(alone, range(STEPS, STEPS + 2)).values()
    for weights in run_ranks(go_on, 4, [one, *two], rule):
        for found in weights:
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value.numpy())


@pytest.mark.multiproc
def test_one_rank_goes_on_from_what_four_saved() -> None:
    (four,) = zip(*run_ranks(pieces_on_ranks, 4, ("zero1",), "adamw"), strict=True)
    alone = bench("adamw", Topology(Sizes(), 0), Groups(), "adamw")
    expected = trained(alone, range(STEPS)).values()
    fresh = bench("zero1", Topology(Sizes(), 0), Groups(), "adamw")
    fresh.optimizer.load_state(SavedState(tensors([p for pieces in four for p in pieces]), shapes(fresh)).read)
    for name, value in expected.items():
        assert torch.equal(fresh.values()[name], value)
