"""Layers split over ranks train as the single process does, whatever else the run is split by."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.support.pieces import Array, Case, Ran, joined, run_cases

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

#: The vocabulary leaves some ranks with little but padding, or with nothing else.
MODELS: dict[str, tuple[str, ...]] = {
    "gpt2": ("model.num_heads=4", "data.vocab_size=130"),
    "llama": (
        "model.num_heads=8",
        "model.num_kv_heads=4",
        "model.position=rope",
        "model.norm=rmsnorm",
        "model.activation=swiglu",
        "model.ffn_size=88",
        "model.bias=false",
        "model.tie_embeddings=false",
        "model.label_smoothing=0.1",
        "train.global_batch_size=4",
        "data.vocab_size=101",
    ),
}
SEQUENCE = ("parallel.sequence=true",)
#: By the world they take: plugins besides the layers', and sizes.
SPLITS: dict[int, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    1: {"t1": ((), ("parallel.tensor=1",))},
    2: {"t2": ((), ())},
    4: {
        "t4": ((), ("parallel.tensor=4",)),
        "t2-d2": ((), ("parallel.data=2",)),
        "t2-p2-1f1b": (("schedule=1f1b",), ()),
        "t2-p2-interleaved": (("schedule=interleaved",), ()),
        "t2-p2-zero-bubble-h1": (("schedule=zero-bubble",), ()),
        "t2-p2-zero-bubble-v": (("schedule=zero-bubble,variant=v",), ()),
    },
}
#: What is tried of the second model: every split, but each with or without sequence parallelism.
WITH_SEQUENCE = ("t2", "t4", "t2-p2-interleaved", "t2-p2-zero-bubble-h1")


def split_cases(world: int) -> dict[str, Case]:
    """Every case of a world by name: model, split, and whether the sequence is split too."""
    cases = {}
    for split, (plugins, sets) in SPLITS[world].items():
        for model, options in MODELS.items():
            for sequence in (False, True):
                if (split == "t1" and sequence) or (model == "llama" and sequence != (split in WITH_SEQUENCE)):
                    continue
                name = f"{model}-{split}{'-sequence' if sequence else ''}"
                cases[name] = Case(options + sets + SEQUENCE * sequence, ("parallel-layer=tensor", *plugins))
    return cases


CASES = {world: split_cases(world) for world in SPLITS}
NAMES = [(world, name) for world, cases in CASES.items() for name in cases]


@cache
def ran(world: int) -> dict[str, list[Ran]]:
    """Every case of ``world`` by name: what each rank saw."""
    return dict(zip(CASES[world], run_cases(world, list(CASES[world].values())), strict=True))


@cache
def alone() -> dict[str, Ran]:
    """Each model on dense layers in one process, in fp32 and, by the name ``<model>-exact``, for a step in float64."""
    cases = {model: Case(sets) for model, sets in MODELS.items()}
    cases |= {f"{model}-exact": Case((*sets, "train.steps=1"), dtype="float64") for model, sets in MODELS.items()}
    return {name: ranks[0] for name, ranks in zip(cases, run_cases(1, list(cases.values())), strict=True)}


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_a_split_gives_the_losses_of_the_single_process(world: int, name: str) -> None:
    split, single = ran(world)[name][0].seen, alone()[name.partition("-")[0]].seen
    assert len(single.losses) == 20
    np.testing.assert_allclose(split.losses, single.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(split.norms, single.norms, rtol=1e-4)
    np.testing.assert_allclose(split.validation, single.validation, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_first_gradients_err_at_most_twice_as_much_as_those_of_the_single_process(world: int, name: str) -> None:
    model = name.partition("-")[0]
    exact, dense, split = (joined(ranks) for ranks in ([alone()[f"{model}-exact"]], [alone()[model]], ran(world)[name]))
    assert split.keys() == dense.keys() == exact.keys()
    allowed = {tensor: 2 * error(dense[tensor], exact[tensor]) for tensor in exact}
    found = {tensor: error(split[tensor], exact[tensor]) for tensor in exact}
    assert {tensor: (found[tensor], allowed[tensor]) for tensor in exact if found[tensor] > allowed[tensor]} == {}


def error(gradient: Array, exact: Array) -> float:
    return float(np.linalg.norm(gradient.astype(np.float64) - exact))


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_what_ran_is_what_was_planned(world: int, name: str) -> None:
    for rank in ran(world)[name]:
        assert len(rank.seen.executed) == 20
        assert all(executed == rank.seen.planned for executed in rank.seen.executed)
        assert set(rank.seen.peaks) == {rank.seen.plan.peak_in_flight[rank.seen.stage]}
        assert set(rank.seen.left) == {0}
