"""Random numbers over tensor-parallel ranks: equal where ranks hold the same, different where they do not.

Megatron-LM (Shoeybi et al. 2019), appendix B.2, and one thing more: neither the pipeline nor the data split shows.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.integration.pairwise import WHOLE
from tests.integration.pieces import Case, Ran, Where, joined, run_cases

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

#: The second step has what the first one drew in its weights.
STEPS = 4 if WHOLE else 2
MICROBATCHES, LAYERS = 2, 4
SETS = (
    f"model.num_layers={LAYERS}",
    "model.num_heads=4",
    "model.dropout=0.1",
    f"train.global_batch_size={2 * MICROBATCHES}",
    "train.micro_batch_size=2",
    f"train.steps={STEPS}",
    "train.lr_warmup=0",  # the first step of a warm-up changes no weight
    "eval.interval=0",
    "eval.batches=1",
)
ONE, SEQUENCE, RECOMPUTE = ("parallel.tensor=1",), ("parallel.sequence=true",), ("train.recompute=full",)
SELECTIVE = ("train.recompute=core_attn,mlp", "train.offload=attn,head")


def case(schedule: tuple[str, ...] = (), *sets: str) -> Case:
    return Case((*SETS, *sets), ("parallel-layer=tensor", *schedule))


CASES: dict[int, dict[str, Case]] = {
    1: {
        "t1": case((), *ONE),
        "t1 again": case((), *ONE),
        "t1 recompute": case((), *ONE, *RECOMPUTE),
    },
    2: {
        "t2": case(),
        "t2 again": case(),
        "t2 recompute": case((), *RECOMPUTE),
        "t2 another seed": case((), "train.seed=77"),
        "t2 sequence": case((), *SEQUENCE),
        "t2 sequence recompute": case((), *SEQUENCE, *RECOMPUTE),
    },
    4: {
        "t2 p2": case(("schedule=1f1b",)),
        "t2 p2 again": case(("schedule=1f1b",)),
        "t2 p2 recompute": case(("schedule=1f1b",), *RECOMPUTE),
        "t2 zero-bubble": case(("schedule=zero-bubble",)),
        "t2 zero-bubble selective": case(("schedule=zero-bubble",), *SELECTIVE),
        "t2 d2": case((), "parallel.data=2"),
        "t2 p2 sequence": case(("schedule=interleaved",), *SEQUENCE),
        "t2 p2 sequence recompute": case(("schedule=interleaved",), *SEQUENCE, *RECOMPUTE),
        "t2 p2 sequence selective": case(("schedule=interleaved",), *SEQUENCE, *SELECTIVE),
        "t2 d2 sequence": case((), *SEQUENCE, "parallel.data=2"),
    },
}


#: Asked for by ``make grid`` alone: a schedule that others try as well, one rank, what others combine, and runs that
#: are made twice. Runs that differ from themselves differ from recomputed ones too.
RARE = {"t2 p2", "t2 p2 recompute", *(f"{name} again" for name in ("t1", "t2", "t2 p2"))}
RARE |= {"t1", "t1 recompute", "t2 sequence recompute", "t2 zero-bubble selective", "t2 d2 sequence"}
RARE |= {"t2 p2 sequence recompute"}
#: What is equal bit for bit.
ALIKE = [
    ("t1", "t1 recompute"),
    ("t2", "t2 recompute"),
    ("t2 sequence", "t2 sequence recompute"),
    ("t2 p2", "t2 p2 recompute"),
    ("t2 p2 sequence", "t2 p2 sequence recompute"),
    ("t2 p2 sequence", "t2 p2 sequence selective"),
    ("t2 zero-bubble", "t2 zero-bubble selective"),
    *[(name, f"{name} again") for name in ("t1", "t2", "t2 p2")],
]


def asked(*names: str) -> bool:
    """Whether these are to be run."""
    return WHOLE or not RARE.intersection(names)


@cache
def ran(name: str) -> list[Ran]:
    """What each rank saw of the case ``name``."""
    return started(next(world for world, cases in CASES.items() if name in cases))[name]


@cache
def started(world: int) -> dict[str, list[Ran]]:
    mine = {name: case for name, case in CASES[world].items() if asked(name)}
    return dict(zip(mine, run_cases(world, list(mine.values())), strict=True))


@pytest.mark.parametrize(("one", "other"), [pair for pair in ALIKE if asked(*pair)])
def test_a_recomputed_run_and_the_same_run_twice_are_equal_bit_for_bit(one: str, other: str) -> None:
    assert ran(one)[0].losses == ran(other)[0].losses
    assert ran(one)[0].seen.norms == ran(other)[0].seen.norms
    first, second = joined(ran(one)), joined(ran(other))
    for name, gradient in first.items():
        np.testing.assert_array_equal(gradient, second[name], err_msg=name)


def test_another_seed_drops_others() -> None:
    assert not set(ran("t2")[0].masks.values()) & set(ran("t2 another seed")[0].masks.values())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *[("t2", "t2 p2")] * asked("t2 p2"),
        ("t2", "t2 zero-bubble"),
        ("t2", "t2 d2"),
        ("t2 sequence", "t2 p2 sequence"),
        *[("t2 sequence", "t2 d2 sequence")] * asked("t2 d2 sequence"),
    ],
)
def test_masks_depend_neither_on_the_pipeline_nor_on_the_data_split(one: str, other: str) -> None:
    np.testing.assert_allclose(ran(one)[0].losses, ran(other)[0].losses, rtol=0, atol=1e-5)
    assert masks(one) == masks(other)


def masks(name: str) -> list[dict[Where, str]]:
    """The attention masks of all microbatches and layers, by tensor-parallel rank, which is the fastest axis."""
    ranks = ran(name)
    merged: list[dict[Where, str]] = [{}, {}]
    for rank, seen in enumerate(ranks):
        merged[rank % 2] |= seen.masks
    assert all(len(each) == MICROBATCHES * LAYERS for each in merged)
    return merged


@pytest.mark.parametrize("name", ["t2", "t2 zero-bubble", "t2 d2"])
def test_what_tensor_ranks_hold_together_is_equal_bit_for_bit(name: str) -> None:
    ranks = ran(name)
    for even, odd in zip(ranks[::2], ranks[1::2], strict=True):
        assert len(even.stream) > 0
        assert even.stream == odd.stream


@pytest.mark.parametrize("name", ["t2", "t2 sequence", "t2 zero-bubble", "t2 p2 sequence"])
def test_attention_drops_differently_on_every_tensor_rank_microbatch_and_layer(name: str) -> None:
    drawn = [mask for each in masks(name) for mask in each.values()]
    assert len(set(drawn)) == len(drawn) == 2 * MICROBATCHES * LAYERS  # on two ranks


def test_under_sequence_parallelism_each_rank_drops_its_own_tokens() -> None:
    first, second = (set(rank.stream.values()) for rank in ran("t2 sequence"))
    assert not first & second
