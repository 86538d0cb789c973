"""Which segments go together, what a region reads and leaves, and which regions read what the one before left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_run.contracts import Region, Segment
from megatron_run.errors import InputError
from megatron_run_engine.capture import call, chained, check_scope, choose_regions
from megatron_run_engine.runtime.comm import Groups
from megatron_run_testing.build_contexts import single_process_context


def segment(text: str, layer: int = 0, **options: Any) -> Segment:
    """``name: inputs -> outputs``."""
    name, _, rest = text.partition(": ")
    inputs, outputs = (tuple(part.split()) for part in rest.split("->"))
    return Segment(name, layer, 0, lambda *x: x, inputs, outputs, (), **options)


EXPERTS = (
    segment("attn: x -> x"),
    segment("router: x -> h probs balance"),
    segment("preprocess: probs -> map counts"),
    segment("dispatch: h map counts -> tokens splits", why_eager="it reads the tokens of each expert on the host"),
    segment("experts: tokens splits -> tokens"),
    segment("combine: tokens probs map x -> x"),
)
DENSE = (segment("attn: x -> x", 1), segment("mlp: x -> x", 1))


def shown(regions: Iterator[Region] | tuple[Region, ...]) -> list[tuple[str, str, str]]:
    return [
        ("+".join(each.name for each in region.segments), " ".join(region.inputs), " ".join(region.outputs))
        for region in regions
    ]


def test_neighbours_go_together_and_leave_what_others_read() -> None:
    regions = choose_regions([[*EXPERTS, *DENSE]], {"attn", "router", "preprocess", "combine", "mlp"})
    assert shown(regions) == [
        ("attn+router+preprocess", "x", "x h probs balance map counts"),
        ("combine", "tokens probs map x", "x"),
        ("attn+mlp", "x", "x"),
    ]


def test_what_only_the_region_itself_reads_stays_inside() -> None:
    first, second = segment("a: x -> h"), segment("b: h -> x")
    assert shown(choose_regions([[first, second]], {"a", "b"})) == [("a+b", "x", "x")]
    again = segment("c: h x -> y")
    assert shown(choose_regions([[first, second, again]], {"a", "b"})) == [("a+b", "x", "h x")]


def test_a_region_ends_before_a_second_segment_that_draws() -> None:
    attn, mlp = segment("attn: x -> x", draws=True), segment("mlp: x -> x", draws=True)
    quiet = segment("quiet: x -> x")
    regions = choose_regions([[attn, quiet, mlp]], {"attn", "quiet", "mlp"})
    assert [name for name, *_ in shown(regions)] == ["attn+quiet", "mlp"]
    assert [region.drawing.name for region in regions] == ["attn", "mlp"]


def test_what_must_run_eagerly_is_refused_with_its_reason() -> None:
    with pytest.raises(InputError, match=r"dispatch of layer 0 .*: it reads the tokens .*; leave dispatch"):
        choose_regions([EXPERTS], {"attn", "dispatch"})


def test_regions_are_of_one_chunk_each() -> None:
    regions = choose_regions([[DENSE[0]], [DENSE[1]]], {"attn", "mlp"})
    assert [region.chunk for region in regions] == [0, 1]


def test_a_region_reads_in_place_only_what_the_one_right_before_left() -> None:
    chunks = [[segment("a: x -> x", 0), segment("a: x -> x", 1), segment("e: x -> x", 1), segment("a: x -> x", 2)]]
    first, second, third = regions = choose_regions(chunks, {"a"})
    assert chained(regions, chunks) == {second: first}
    reads_more = [[segment("a: x -> x", 0), segment("b: x tokens -> x", 1)]]
    assert chained(choose_regions(reads_more, {"a", "b"}), reads_more) == {}
    two = [[segment("a: x -> x", 0)], [segment("a: x -> x", 1)]]
    assert chained(choose_regions(two, {"a"}), two) == {}
    assert third not in chained(regions, chunks)


def test_a_region_is_called_through_its_names() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    def minus(h: Tensor, x: Tensor) -> Tensor:
        return h - x

    chunk = [Segment("a", 0, 0, twice, ("x",), ("h", "y"), ()), Segment("b", 0, 1, minus, ("h", "x"), ("x",), ())]
    (region,) = choose_regions([chunk], {"a", "b"})
    assert (region.inputs, region.outputs) == (("x",), ("y", "x"))
    assert [x.item() for x in call(region, [torch.tensor(5.0)])] == [15.0, 5.0]


def test_a_name_that_no_layer_publishes_is_refused_with_the_nearest() -> None:
    context = single_process_context()
    check_scope(("attn",), [DENSE], context)
    with pytest.raises(InputError, match=r"names 'atn', which no layer publishes; did you mean 'attn'\? the model pub"):
        check_scope(("atn",), [DENSE], context)
    with pytest.raises(InputError, match="did you mean 'step'"):
        check_scope(("stepp",), [DENSE], context)


class Stages(Groups):
    """The groups of the second of two stages, of which the first publishes an embedding."""

    def gather_names(self, names: Sequence[str], device: torch.device) -> list[list[str]]:
        return [["embedding", "attn"], list(names)]


def test_what_another_stage_publishes_is_known_and_listed() -> None:
    context = replace(single_process_context(), groups=Stages())
    check_scope(("embedding",), [DENSE], context)
    with pytest.raises(InputError, match=r"did you mean 'embedding'\? the model publishes embedding, attn, mlp"):
        check_scope(("embeding",), [DENSE], context)
