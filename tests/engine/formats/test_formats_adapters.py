"""What a plugin says of adapters is checked before a step of them is written."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_run.contracts import Adapters, AdapterWeights
from megatron_run.errors import CheckpointError
from megatron_run_engine.formats.adapters import check_adapters

SHAPES = {"m.weight": (5, 3), "norm.weight": (3,)}


def weights(shapes: dict[str, tuple[int, ...]]) -> AdapterWeights:
    tensors = {f"{name}.weight": partial(torch.zeros, shape) for name, shape in shapes.items()}
    return AdapterWeights(Adapters("lora", "a", "b", 2, 1.0), tensors)


def test_adapters_of_any_rank_fit_their_matrix() -> None:
    check_adapters(weights({"m.a": (7, 3), "m.b": (5, 7)}), SHAPES, Path("x"))


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({}, "there are none"),
        ({"m.a": (2, 3)}, "m has no matrix, or lacks one of its two adapters"),
        ({"n.a": (2, 3), "n.b": (5, 2)}, "n has no matrix"),
        ({"norm.a": (2, 3), "norm.b": (5, 2)}, "norm has no matrix"),
        ({"m.a": (2, 3), "m.b": (5, 4)}, r"A is \[2, 3\] and B \[5, 4\] for m, which is \[5, 3\]"),
        ({"m.a": (2,), "m.b": (5, 2)}, r"A is \[2\] and B"),
    ],
)
def test_others_are_named(shapes: dict[str, tuple[int, ...]], why: str) -> None:
    with pytest.raises(CheckpointError, match=f"the adapters in x do not fit the model: {why}"):
        check_adapters(weights(shapes), SHAPES, Path("x"))
