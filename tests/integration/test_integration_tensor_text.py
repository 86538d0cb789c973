"""Text generated over tensor-parallel ranks is the single process's."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests.integration.pairwise import WHOLE
from tests.integration.pieces import Case, run_cases

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

SEQUENCE = ("parallel.sequence=true",)
#: The window grows from 3 tokens to its 8, of which 4 ranks divide every fourth, and then moves.
SETS = (
    "model.num_heads=4",
    "train.lr=1e-2",
    "train.lr_shape=constant",
    "train.steps=2",
    "train.global_batch_size=4",
    "train.sequence_length=8",
    "eval.batches=1",
    "eval.sample=9",
    "eval.prompt=abc",
)
SPLITS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "t2": (2, (), ()),
    "t2 sequence": (2, (), SEQUENCE),
    "t4": (4, (), ("parallel.tensor=4",)),
    "t4 sequence": (4, (), ("parallel.tensor=4", *SEQUENCE)),
    "t2 p2": (4, ("schedule=1f1b",), ()),
    "t2 p2 sequence": (4, ("schedule=interleaved",), SEQUENCE),
    "t2 p2 scattered": (4, ("schedule=zero-bubble,variant=v",), ("parallel.scatter_messages=true",)),
    "t2 d2": (4, (), ("parallel.data=2",)),
}


#: By split and temperature: the likeliest token at 0, a drawn one else. ``make grid`` has both of every split; few have
#: each of the settings, and one a pipeline.
CASES = list(product(SPLITS, ("0", "0.8"))) if WHOLE else [("t4 sequence", "0.8"), ("t2 p2 scattered", "0")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text whose letters follow each other in many ways."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"{number} times {number} is {number * number}.\n" for number in range(900)))
    return path


@cache
def texts(world: int, corpus: Path) -> dict[tuple[str, str], list[str | None]]:
    """What every rank says was written, by split and temperature; the single process is the split ``alone``."""
    chosen = [case for case in CASES if SPLITS[case[0]][0] == world] or [("alone", "0"), ("alone", "0.8")]
    cases = []
    for name, temperature in chosen:
        _, plugins, sets = SPLITS.get(name, (1, (), ("parallel.tensor=1",)))
        layers = ["parallel-layer=tensor"] * (world > 1)
        sets = (*SETS, *sets, f"eval.temperature={temperature}")
        cases.append(Case(sets, (f"data=text,paths={corpus}", *plugins, *layers)))
    return {case: [rank.text for rank in ranks] for case, ranks in zip(chosen, run_cases(world, cases), strict=True)}


@pytest.mark.parametrize(("split", "temperature"), CASES)
def test_a_split_writes_the_text_of_the_single_process(split: str, temperature: str, corpus: Path) -> None:
    (alone,) = texts(1, corpus)["alone", temperature]
    assert alone is not None
    assert len(alone) > 8  # of 12 bytes, of which some make no text of their own
    world = SPLITS[split][0]
    assert texts(world, corpus)[split, temperature] == [alone] * world


def test_the_temperature_makes_a_difference(corpus: Path) -> None:
    alone = texts(1, corpus)
    assert alone["alone", "0"] != alone["alone", "0.8"]
