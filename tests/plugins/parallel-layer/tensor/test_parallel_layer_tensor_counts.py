"""What crosses tensor-parallel ranks in one forward and backward of a model: how many collectives of how many bytes.

Legend: s sequence, b micro batch, h hidden, L layers, t tensor-parallel size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_run.contracts import Init, LinearPart, LinearSpec
from megatron_run.contracts.topology import Topology
from megatron_run_engine.runtime.comm import Groups
from megatron_run_testing.build_contexts import example_microbatch, prepare
from tests.support.ranks import run_ranks
from tests.support.tensor_layers import gpt_context, rank_of, split_gpt, tensor_layers

SEQUENCE, BATCH, HIDDEN, ITEM = 16, 2, 32, 4
#: The bytes of one activation, s*b*h, and of one number a token.
WHOLE, TOKENS = SEQUENCE * BATCH * HIDDEN * ITEM, SEQUENCE * BATCH * ITEM
#: torch's names of the collectives, of which 2.13 renamed two, and which argument is the whole tensor.
COLLECTIVES = {
    "all_reduce": ("all-reduce", 0),
    "all_gather_into_tensor": ("all-gather", 0),
    "all_gather_single": ("all-gather", 0),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
    "reduce_scatter_single": ("reduce-scatter", 1),
}
#: What must not be called at all: the ways to communicate that have no line above.
OTHERS = (
    "all_gather",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "isend",
    "reduce",
)

Counts = Counter[tuple[str, int]]

pytestmark = pytest.mark.multiproc


@contextmanager
def counted() -> Iterator[Counts]:
    """Count (collective, bytes of the whole tensor) of every call of torch.distributed."""
    counts: Counts = Counter()

    def counting(name: str) -> Any:
        kind, whole = COLLECTIVES[name]
        function = getattr(dist, name)

        def call(*tensors: Any, **keywords: Any) -> Any:
            counts[kind, tensors[whole].nbytes] += 1
            return function(*tensors, **keywords)

        return call

    here = {name: counting(name) for name in COLLECTIVES if hasattr(dist, name)}
    refused = {name: mock.Mock(side_effect=AssertionError(f"{name} is called")) for name in OTHERS}
    with mock.patch.multiple(dist, **here, **refused):
        yield counts


#: Name -> (layers, options of the model, how it is run).
RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one layer": (1, {}, {}),
    "three layers": (3, {}, {}),
    "one layer, sequence": (1, {}, {"sequence": True}),
    "three layers, sequence": (3, {}, {"sequence": True}),
}
VARIANTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "no overlap": (3, {}, {"overlap": False}),
    "no overlap, sequence": (3, {}, {"sequence": True, "overlap": False}),
    "recomputed": (3, {}, {"recompute": "full"}),
    "recomputed, sequence": (3, {}, {"sequence": True, "recompute": "full"}),
    "recomputed, nothing dropped": (3, {"dropout": 0.0}, {"recompute": "full"}),
    "rope, swiglu, untied, smoothed": (
        3,
        {"position": "rope", "activation": "swiglu", "tie_embeddings": False, "label_smoothing": 0.1},
        {},
    ),
}


def count_step(topology: Topology, groups: Groups, layers: int, options: Any, how: Any) -> tuple[Counts, Counts]:
    """The collectives of one forward and of one backward."""
    sequence, recompute = how.get("sequence", False), how.get("recompute", "none")
    context = gpt_context(
        topology,
        groups,
        {"num_layers": layers, **options},
        sequence=sequence,
        dtype=torch.float32,
        recompute=recompute,
    )
    built = split_gpt(context, overlap=how.get("overlap", True))
    with counted() as forward:
        losses = built.forward(example_microbatch(307, length=SEQUENCE))[0].losses
    with counted() as backward:
        torch.autograd.backward(losses["lm"][0])
    return forward, backward


def count_steps(rank: int, world: int, runs: Mapping[str, Any]) -> dict[str, tuple[Counts, Counts]]:
    here = rank_of(rank, world)
    return {name: count_step(*here, *run) for name, run in runs.items()}


@cache
def counts(world: int) -> dict[str, tuple[Counts, Counts]]:
    """Of every run; the variants on two ranks only."""
    first, *others = run_ranks(count_steps, world, {**RUNS, **VARIANTS} if world == 2 else RUNS)
    assert all(other == first for other in others), "ranks disagree"
    found: dict[str, tuple[Counts, Counts]] = first
    return found


def head(sums: int = 2) -> Counts:
    """The cross entropy's two all-reduces: the largest logit of each token, then the sums that its loss is made of."""
    return Counter({("all-reduce", TOKENS): 1, ("all-reduce", sums * TOKENS): 1})


@pytest.mark.parametrize(("run", "layers"), [("one layer", 1), ("three layers", 3)])
@pytest.mark.parametrize("world", [2, 4])
def test_two_all_reduces_forward_and_two_backward_in_every_layer(world: int, run: str, layers: int) -> None:
    forward, backward = counts(world)[run]
    embedding, output = 1, 1
    assert forward == Counter({("all-reduce", WHOLE): 2 * layers + embedding}) + head()
    assert backward == Counter({("all-reduce", WHOLE): 2 * layers + output})


@pytest.mark.parametrize(("run", "layers"), [("one layer, sequence", 1), ("three layers, sequence", 3)])
@pytest.mark.parametrize("world", [2, 4])
def test_under_sequence_parallelism_each_is_an_all_gather_and_a_reduce_scatter(
    world: int, run: str, layers: int
) -> None:
    """Such a pair of s*b*h moves what an all-reduce of it moves."""
    forward, backward = counts(world)[run]
    embedding, output = 1, 1
    gathers, scatters = 2 * layers + output, 2 * layers + embedding
    assert forward == Counter({("all-gather", WHOLE): gathers, ("reduce-scatter", WHOLE): scatters}) + head()
    again = 2 * layers + output  # the input of each column linear layer, of which a rank kept its own part only
    assert backward == Counter({("all-gather", WHOLE): scatters + again, ("reduce-scatter", WHOLE): gathers})


def test_without_overlap_the_numbers_are_the_same() -> None:
    assert counts(2)["no overlap"] == counts(2)["three layers"]


def test_without_overlap_the_whole_sequence_is_kept_and_not_gathered_again() -> None:
    (forward, backward), (overlapped, again) = counts(2)["no overlap, sequence"], counts(2)["three layers, sequence"]
    assert forward == overlapped
    assert again - backward == Counter({("all-gather", WHOLE): 2 * 3 + 1})


def test_other_positions_activations_and_embeddings_change_no_number_and_smoothing_adds_a_sum() -> None:
    (forward, backward), (plain, plain_backward) = (
        counts(2)["rope, swiglu, untied, smoothed"],
        counts(2)["three layers"],
    )
    assert forward - head(3) == plain - head(2)
    assert backward == plain_backward


@pytest.mark.parametrize(
    ("run", "once", "added"),
    [
        ("recomputed", "three layers", {("all-reduce", WHOLE): 2 * 3}),
        # Torch stops once all that was saved is there again: where nothing is dropped, before a layer's last sum.
        ("recomputed, nothing dropped", "three layers", {("all-reduce", WHOLE): 3}),
        (
            "recomputed, sequence",
            "three layers, sequence",
            {("all-gather", WHOLE): 2 * 3, ("reduce-scatter", WHOLE): 2 * 3},
        ),
    ],
)
def test_recomputation_adds_the_forward_of_its_layers_to_the_backward(
    run: str, once: str, added: dict[tuple[str, int], int]
) -> None:
    (forward, backward), (forward_once, backward_once) = counts(2)[run], counts(2)[once]
    assert forward == forward_once
    assert backward - backward_once == Counter(added)


class Products(TorchDispatchMode):
    """Notes every matrix product among ``events``."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.bmm):
            self.events.append("product")
        return func(*args, **(kwargs or {}))


@dataclass
class Watched:
    """A collective's handle that notes when it is waited for."""

    kind: str
    work: Any
    events: list[str]

    def wait(self) -> None:
        self.work.wait()
        self.events.append(f"{self.kind} ends")


def watching(name: str, events: list[str]) -> Any:
    kind, function = COLLECTIVES[name][0], getattr(dist, name)

    def call(*tensors: Any, **keywords: Any) -> Watched:
        events.append(f"{kind} begins")
        return Watched(kind, function(*tensors, **keywords), events)

    return call


def column_events(topology: Topology, groups: Groups, sequence: bool, overlap: bool) -> list[str]:
    """What happens in the backward of a column linear layer, in order."""
    events: list[str] = []
    context = gpt_context(topology, groups, {}, sequence=sequence)
    parts, init = (LinearPart("up", 12),), Init("normal", 0.5)
    layer: Any = tensor_layers(context, overlap=overlap).column_linear(LinearSpec(8, parts, init, bias=True))
    prepare(context, [layer])
    y = layer(torch.randn(8, 2, 8, dtype=torch.float64).requires_grad_())
    watched = {name: watching(name, events) for name in COLLECTIVES if hasattr(dist, name)}
    with mock.patch.multiple(dist, **watched), Products(events):
        y.sum().backward()
    return events


def all_column_events(rank: int, world: int) -> dict[tuple[bool, bool], list[str]]:
    here = rank_of(rank, world)
    cases = [(sequence, overlap) for sequence in (False, True) for overlap in (False, True)]
    return {case: column_events(*here, *case) for case in cases}


def test_a_collective_runs_while_the_weight_gradient_is_computed() -> None:
    for events in run_ranks(all_column_events, 2):
        assert events[False, True] == [
            "product",  # the gradient of the input
            "all-reduce begins",
            "product",  # the gradient of the weight
            "all-reduce ends",
        ]
        assert events[True, True] == [
            "all-gather begins",
            "product",  # the gradient of the input, for which the input itself is not needed
            "all-gather ends",
            "reduce-scatter begins",
            "product",  # the gradient of the weight
            "reduce-scatter ends",
        ]
        for sequence in (False, True):
            begins = [event.split()[0] for event in events[sequence, False] if event.endswith("begins")]
            assert events[sequence, False] == [
                "product",
                "product",
                *(f"{begins[0]} {when}" for when in ("begins", "ends")),
            ]
