"""The counts that the host reads of a layer of experts: none on one rank, one copy a layer on several, awaited late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megatron_run_engine.nn.moe import dispatch
from megatron_run_engine.nn.moe.dispatch import AllGather, AllToAll, Dispatcher, OneRank, Padded, make_dispatcher
from megatron_run_engine.nn.moe.placement import place_all, place_within_capacity
from megatron_run_engine.nn.moe.router import load_of
from megatron_run_engine.nn.spec import ExpertSpec
from megatron_run_engine.runtime.comm import ALONE, ParallelGroup

TOKENS, HIDDEN, EXPERTS, CHOICES = 6, 8, 4, 2
#: Methods that let the host wait for a device.
READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


class Twins(ParallelGroup):
    """Two ranks that do the same, of which this process is the first."""

    def gather(self, part: Tensor) -> Tensor:
        NOTED.append("gather")
        return torch.cat([part, part])

    def scatter_sum(self, whole: Tensor) -> Tensor:
        return 2 * whole[: len(whole) // 2]

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        NOTED.append("exchange")
        from_each = rows[: receive[0]] if len(rows) >= receive[0] else rows.new_zeros(receive[0], rows.shape[1])
        return torch.cat([from_each, rows.new_zeros(receive[1], rows.shape[1])])


#: What happened, in order.
NOTED: list[str] = []


class Host(TorchFunctionMode):
    """Counts ``reads`` of tensors that have not arrived on the host; what is computed from such as have is there."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.here = 0, list[Tensor]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        arrived = bool(given) and all(any(x is other for other in self.here) for x in given)
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        self.reads += name in READS and not arrived
        if name in ("index_select", "copy_"):
            NOTED.append(name)
        if arrived:
            self.here += [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        return result


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """Watches the numbers that are on their way."""
    found, wait = Host(), dispatch.HostCopy.wait

    def awaited(self: dispatch.HostCopy) -> Tensor:
        NOTED.append("wait")
        found.here.append(wait(self).clone())
        return found.here[-1]

    monkeypatch.setattr(dispatch.HostCopy, "wait", awaited)
    NOTED.clear()
    return found


def spec(**more: Any) -> ExpertSpec:
    return ExpertSpec(count=EXPERTS, top_k=CHOICES, ffn=8, layers=frozenset({0}), **more)


def run(dispatcher: Dispatcher, options: ExpertSpec, host: Host) -> Tensor:
    """A layer whose experts change nothing, forward and backward, under the eyes of ``host``: the tokens' gradient."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
    weights, chosen = torch.rand(TOKENS, EXPERTS, generator=generator).topk(CHOICES)
    load = load_of(chosen, EXPERTS)
    placed = place_all(chosen, load)
    if options.capacity_factor is not None:
        placed = place_within_capacity(chosen, weights, load, options)
    with host:
        rows, *carried = dispatcher.dispatch(tokens, weights, *placed)
        dispatcher.count(rows, *carried)
        returned = dispatcher.collect(rows * 1, weights, *carried)
        y = dispatcher.combine(returned, weights, placed.order, placed.place)
        torch.autograd.backward(y, torch.ones_like(y))
    assert tokens.grad is not None
    return tokens.grad


@pytest.mark.parametrize("kind", [AllToAll, AllGather])
@pytest.mark.parametrize("factor", [None, 0.75], ids=["dropless", "capacity"])
def test_the_host_waits_once_in_a_layer_on_several_ranks(
    kind: type[Dispatcher], factor: float | None, host: Host
) -> None:
    """Whatever it needs of the counts, in the forward and in the backward."""
    run(kind(Twins(0, 2), EXPERTS), spec(capacity_factor=factor), host)
    assert NOTED.count("wait") == 1
    assert host.reads == 0


@pytest.mark.parametrize("kind", [AllToAll, AllGather])
def test_it_waits_when_the_rest_has_begun(kind: type[Dispatcher], host: Host) -> None:
    """The counts leave first; rows are copied, or all tokens gathered, before the host waits for them."""
    run(kind(Twins(0, 2), EXPERTS), spec(), host)
    before = NOTED[: NOTED.index("wait")]
    assert before == (["gather", "index_select"] if kind is AllToAll else ["gather"] * 4)


def test_one_rank_without_a_capacity_lets_the_host_read_nothing(host: Host) -> None:
    options = spec()
    dispatcher = make_dispatcher(options, ALONE, on_device=True)
    assert isinstance(dispatcher, OneRank)
    found = run(dispatcher, options, host)
    assert (host.reads, NOTED.count("wait")) == (0, 0)
    expected = run(AllToAll(ALONE, EXPERTS), options, host)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("peers", "more", "on_device", "kind", "why"),
    [
        (ALONE, {}, True, OneRank, ""),
        (ALONE, {"dispatch": "allgather"}, True, OneRank, ""),
        (ALONE, {"capacity_factor": 1.0}, True, AllToAll, "model.experts.capacity_factor drops some of them"),
        (ALONE, {"capacity_factor": 1.0, "pad": True}, False, Padded, ""),
        (ALONE, {"dispatch": "allgather"}, False, AllGather, "the experts' layers need it there"),
        (Twins(0, 2), {}, True, AllToAll, "tokens travel among 2 expert-parallel ranks"),
        (Twins(0, 2), {"capacity_factor": 1.0, "pad": True}, True, Padded, ""),
    ],
)
def test_whether_shapes_follow_the_routing_is_said_by_the_dispatcher(
    peers: ParallelGroup, more: dict[str, Any], on_device: bool, kind: type[Dispatcher], why: str
) -> None:
    made = make_dispatcher(spec(**more), peers, on_device=on_device)
    assert type(made) is kind
    assert made.why_dynamic.startswith(why)
    assert bool(made.why_dynamic) == bool(why)
