"""Whole runs with DeepSpeed's partitions under every kind of split, beside the same runs with adamw."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest

from megatron_run.config.request import Request
from tests.support.training import Seen, train_many

pytestmark = [pytest.mark.multiproc, pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")]

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


@cache
def runs() -> dict[tuple[str, str], list[Seen]]:
    """By split and optimizer, all in the same processes."""
    asked = {(split, "optimizer=adamw"): SPLITS[split] for split in SPLITS}
    asked |= {(split, f"optimizer=deepspeed,stage={stage}"): SPLITS[split] for split, stage in CASES}
    requests = [
        Request(configs=("preset:tiny",), sets=(*BASE, *sets), plugins=(*plugins, optimizer), nproc=4)
        for (_, optimizer), (plugins, sets) in asked.items()
    ]
    return dict(zip(asked, train_many(4, requests), strict=True))


@pytest.mark.parametrize(("split", "stage"), CASES)
def test_a_run_of_any_split_is_that_of_adamw(split: str, stage: int) -> None:
    first, expected = runs()[split, f"optimizer=deepspeed,stage={stage}"][0], runs()[split, "optimizer=adamw"][0]
    tolerance = 2e-3 if "bf16" in split else 1e-6
    assert len(expected.losses) == 4
    np.testing.assert_allclose(first.losses, expected.losses, rtol=0, atol=tolerance)
    np.testing.assert_allclose(first.validation, expected.validation, rtol=0, atol=tolerance)
    np.testing.assert_allclose(first.norms, expected.norms, rtol=tolerance)
    assert min(expected.norms) > 0.5, "nothing was clipped"
