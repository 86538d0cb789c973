"""Whole runs with DeepSpeed's partitions under every kind of split, beside the same runs with adamw; and resumed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from megatron_run.config.request import Request
from tests.integration.reshaping import SHAPES, Found, check_bits, check_samples, reshape
from tests.support.commands import COMMAND, run_command
from tests.support.forked import learned
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.training import Seen, enter_new_world, train_in_turn

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.multiproc,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed"),
]

#: What each rank saw, by split and optimizer.
Runs = dict[tuple[str, str], list[Seen]]
BASE = ("train.steps=4", "train.clip_norm=0.5")
#: Words of four ranks, of which two are data-parallel, or none.
SPLITS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tied stages": (("schedule=1f1b",), ("parallel.data=2", "parallel.pipeline=2")),
    "interleaved in bf16": (
        ("schedule=interleaved",),
        ("parallel.data=2", "parallel.pipeline=2", "train.precision=bf16"),
    ),
    "both ends on one stage": (("schedule=zero-bubble,variant=v",), ("parallel.data=2", "parallel.pipeline=2")),
    "tensor and sequence": (
        ("parallel-layer=tensor",),
        ("parallel.data=2", "parallel.tensor=2", "parallel.sequence=true", "data.vocab_size=61"),
    ),
    "stages without layers": (("schedule=1f1b",), ("parallel.pipeline=4", "parallel.layers=2,0,0,2")),
}
#: Split and stage.
CASES = [("tied stages", 1), ("tied stages", 2), ("interleaved in bf16", 2), ("both ends on one stage", 1)]
CASES += [("tensor and sequence", 2), ("stages without layers", 1)]


#: Shapes without a pipeline, which load from each other.
RESHAPED = tuple(shape for shape in SHAPES if shape[1] == 1)


def train_then_reshape(rank: int, world: int, requests: list[str], folder: str) -> tuple[list[Seen], Found]:
    seen = train_in_turn(rank, world, requests)
    enter_new_world(rank, world, f"{folder}/last")
    with found_once():
        return seen, reshape(rank, world, Path(folder), "deepspeed", RESHAPED)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs, list[Found]]:
    """By split and optimizer, all in the same processes; then what the shapes loaded, by rank, and their folder."""
    asked = {(split, "optimizer=adamw"): SPLITS[split] for split in SPLITS}
    asked |= {(split, f"optimizer=deepspeed,stage={stage}"): SPLITS[split] for split, stage in CASES}
    requests = [
        Request(configs=("preset:tiny",), sets=(*BASE, *sets), plugins=(*plugins, optimizer), nproc=4)
        for (_, optimizer), (plugins, sets) in asked.items()
    ]
    folder = tmp_path_factory.mktemp("runs")
    ranks = run_ranks(train_then_reshape, 4, [request.to_json() for request in requests], str(folder), timeout=280)
    by_request = zip(*(seen for seen, _ in ranks), strict=True)
    return folder, dict(zip(asked, map(list, by_request), strict=True)), [found for _, found in ranks]


@pytest.mark.parametrize(("split", "stage"), CASES)
def test_a_run_of_any_split_is_that_of_adamw(split: str, stage: int, trained: tuple[Path, Runs, list[Found]]) -> None:
    _, runs, _ = trained
    first, expected = runs[split, f"optimizer=deepspeed,stage={stage}"][0], runs[split, "optimizer=adamw"][0]
    tolerance = 2e-3 if "bf16" in split else 1e-6
    assert len(expected.losses) == 4
    np.testing.assert_allclose(first.losses, expected.losses, rtol=0, atol=tolerance)
    np.testing.assert_allclose(first.validation, expected.validation, rtol=0, atol=tolerance)
    np.testing.assert_allclose(first.norms, expected.norms, rtol=tolerance)
    assert min(expected.norms) > 0.5, "nothing was clipped"


def test_shapes_without_a_pipeline_load_the_bits_and_the_place_that_the_others_saved(
    trained: tuple[Path, Runs, list[Found]],
) -> None:
    folder, _, found = trained
    check_bits(folder, found, RESHAPED)
    check_samples(found)


def test_a_run_whose_ranks_die_goes_on_with_fewer_and_with_all_again(tmp_path: Path) -> None:
    """Rank 2 dies in three attempts and stays away in the fourth. DeepSpeed starts threads: no rank is forked."""
    sets = {"train.steps": 8, "train.global_batch_size": 24, "run.elastic": "data", "checkpoint.interval": 1}
    asked = ("preset:tiny", "--plugin", "optimizer=deepspeed", "--nproc", "4", "--max-restarts", "6")
    words = (*COMMAND, *asked, *(word for key, value in sets.items() for word in ("--set", f"{key}={value}")))
    dies = ("rank=2,step=2,attempt=1,at=forward", "rank=2,attempt=2,at=load", "rank=2,attempt=3,at=load")
    faults = ";".join(f"{each},kind=kill" for each in (*dies, "rank=1,step=5,attempt=4,at=optimizer"))
    for name, fault in (("whole", ""), ("struck", faults)):
        variables = {"MEGATRON_RUN_FAULT": fault} if fault else {}
        done = run_command(
            (*words, "--set", f"run.folder={tmp_path / name}"), tmp_path, timeout=140, variables=variables
        )
        assert done.returncode == 0, done.stderr
    attempts = json.loads((tmp_path / "struck" / "run.json").read_text())["attempts"]
    assert [entry["ranks"] for entry in attempts] == [4, 4, 4, 3, 4]
    whole, struck = (
        [row["loss"] for _, row in sorted(learned(tmp_path / name).items())] for name in ("whole", "struck")
    )
    assert len(whole) == 8
    np.testing.assert_allclose(struck, whole, rtol=0, atol=2e-6)
