"""What is swept: values, ranges, and everything that is wrong with them, before a run is made."""

from __future__ import annotations

import pytest

from megatron_run.errors import InputError
from megatron_run_sweep.axes import MAX_RUNS, corners, grid, read_axes


def values_of(text: str) -> tuple[str, ...]:
    (axis,) = read_axes([text], ranges=False)
    return axis.values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("model.dropout=0,0.1", ("0", "0.1")),
        ("optimizer.use=adamw, zero1", ("adamw", "zero1")),
        ("optimizer.betas=0.9,0.95;0.9,0.99", ("0.9,0.95", "0.9,0.99")),
        ("data.paths=../a,../b", ("../a", "../b")),
        ("train.lr=1e-4..1e-2:log,5", ("1e-4", "0.000316228", "0.001", "0.00316228", "1e-2")),
        ("train.weight_decay=0..1,5", ("0", "0.25", "0.5", "0.75", "1")),
        ("model.num_layers=2..8,4", ("2", "4", "6", "8")),
        ("model.hidden_size=16..256:log,5", ("16", "32", "64", "128", "256")),
        ("x.y=-1..1,3", ("-1", "0", "1")),
    ],
)
def test_values_are_read_as_set_takes_them(text: str, values: tuple[str, ...]) -> None:
    assert values_of(text) == values


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["train.lr"], "names no values"),
        (["=1,2"], "names no values"),
        (["train.lr= "], "names no values"),
        (["train.lr=1,,2"], "one is empty"),
        (["train.lr=1,1"], "one is there twice"),
        (["train.lr=1e-4..1e-2:lag,5"], "is no range"),
        (["train.lr=1e-4..1e-2"], "has no number of values"),
        (["train.lr=1..0,3"], "does not rise"),
        (["train.lr=0..1e999,3"], "does not rise"),
        (["train.lr=0..1:log,3"], "has no logarithm"),
        (["train.lr=1..1.0000001,5"], "is too narrow"),
        (["train.lr=1.0..1.0000001:log,3"], "is too narrow"),
        (["train.lr=0..1,1"], "1 value on one axis"),
        (["train.lr=0..1,999999999"], "999999999 values on one axis"),
        (["train.lr=1,2", "train.lr=3"], "swept twice"),
        (["parallel-layer.use=dense", "parallel_layer.use=fp8"], "swept twice"),
        (["run.folder=a,b"], "a folder of its own"),
    ],
)
def test_what_is_wrong_is_said(texts: list[str], why: str) -> None:
    with pytest.raises(InputError, match=why):
        read_axes(texts, ranges=False)


def test_a_range_may_be_left_to_a_sampler() -> None:
    (axis,) = read_axes(["train.lr=1e-4..1e-2:log"], ranges=True)
    assert axis.values == ()
    assert axis.corners == ("1e-4", "1e-2")
    assert axis.range is not None
    assert not axis.range.whole


def test_the_grid_has_every_combination_once() -> None:
    found = grid(read_axes(["a.x=1,2", "b.y=3,4,5"], ranges=False))
    assert [tuple(each.values()) for each in found] == [(x, y) for x in "12" for y in "345"]
    assert all(list(each) == ["a.x", "b.y"] for each in found)


def test_the_number_of_runs_is_bounded_before_any_is_made() -> None:
    axes = read_axes([f"a.x{index}=1..1000,1000" for index in range(2)], ranges=False)
    with pytest.raises(InputError, match=f"a sweep has at most {MAX_RUNS:,}"):
        grid(axes)


def test_corners_have_each_value_without_their_product() -> None:
    axes = read_axes(["a.x=1,2,3", "b.y=0..1"], ranges=True)
    assert corners(axes) == [
        {"a.x": "1", "b.y": "0"},
        {"a.x": "2", "b.y": "0"},
        {"a.x": "3", "b.y": "0"},
        {"a.x": "1", "b.y": "1"},
    ]
