"""Messages between real gloo ranks: shapes that only the sender knows, and the memory of what was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_run.contracts import Boundary, ChunkOut, Microbatch
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.errors import RankLostError
from megatron_run.pipeline.lower import Message
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.verify import verify
from megatron_run_engine.runtime.comm import Channels, ParallelGroup, create_groups
from megatron_run_engine.runtime.messages import Messenger
from megatron_run_schedule_1f1b import OneForwardOneBackward
from tests.support.random_schedules import looped_spec, random_plan
from tests.support.ranks import run_ranks
from tests.support.toy_chunks import ToyChunk
from tests.support.toy_stage import Bench, faults

CPU = torch.device("cpu")


def channels(rank: int, world: int) -> Channels:
    """Those of a pipeline over all ranks."""
    groups = create_groups(Topology(Sizes(pipeline=world), rank), timedelta(seconds=20))
    assert groups.channels is not None
    return groups.channels


def one_forward_one_backward(stages: int, microbatches: int) -> Plan:
    spec = looped_spec(stages, 1, microbatches)
    return verify(spec, OneForwardOneBackward().actions(spec))


@pytest.mark.parametrize(
    ("shape", "dtype", "fits"),
    [
        ((5, 2, 3), torch.float32, True),
        ((0, 2, 7), torch.float32, True),
        ((5, 2, 3), torch.float64, False),
        ((5, 4, 3), torch.float32, False),
        ((5, 2), torch.float32, False),
        ((5, 2, 3, 1), torch.float32, False),
    ],
)
def test_a_tensor_fits_a_boundary_in_all_but_the_sizes_that_only_its_sender_knows(
    shape: tuple[int, ...], dtype: torch.dtype, fits: bool
) -> None:
    boundary, x = Boundary((None, 2, None), torch.float32), torch.empty(shape, dtype=dtype)
    assert boundary.fits(x) is fits
    assert not boundary.known
    assert str(boundary) == "(?, 2, ?) torch.float32"
    if fits:
        assert boundary.resolve(boundary.unknown(x)) == shape


def run_thinning_plans(rank: int, world: int, seeds: range) -> dict[tuple[int, int | None], list[str]]:
    """What is wrong after random plans of a model that drops rows, by seed and lookahead."""
    wires, found = channels(rank, world), {}
    for seed, lookahead in product(seeds, (1, None)):
        plan = random_plan(seed)
        if rank < plan.stages > 1:
            messenger = Messenger(wires, range(world), CPU)
            found[seed, lookahead] = faults(plan, rank, messenger, lookahead, thinning=True, paired=seed % 2 == 1)
    return {case: wrong for case, wrong in found.items() if wrong}


@pytest.mark.multiproc
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 110), marks=pytest.mark.nightly)], ids=str)
def test_random_legal_schedules_carry_shapes_that_only_the_sender_knows(seeds: range) -> None:
    """Among shapes that everybody knows, on the same channels; down to no row at all."""
    assert run_ranks(run_thinning_plans, 4, seeds, timeout=280) == [{}, {}, {}, {}]


def count_sends(rank: int, world: int) -> list[list[int]]:
    """What this stage sends in a step of two microbatches, in elements: of the usual model, and of one that thins."""
    plan, wires, isend = one_forward_one_backward(world, 2), channels(rank, world), dist.isend
    steps: list[list[int]] = []

    def counted(tensor: Tensor, *arguments: Any, **named: Any) -> dist.Work | None:
        steps[-1].append(tensor.numel())
        return isend(tensor, *arguments, **named)

    dist.isend = counted
    for thinning in (False, True):
        steps.append([])
        Bench(plan, rank, Messenger(wires, range(world), CPU), thinning=thinning).run()
    return steps


@pytest.mark.multiproc
def test_a_header_is_sent_only_before_a_tensor_whose_shape_is_unknown() -> None:
    """Of two microbatches the model thins the first: 8 rows of 3 features leave position 0, and 2 of the second."""
    activations, gradients = run_ranks(count_sends, 2)
    assert activations == gradients == [[2 * 3, 2 * 3], [1, 8 * 3, 2 * 3]]


def test_activations_and_gradients_have_a_channel_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one pair of ranks, in both roles: on one NCCL communicator they would wait for each other."""
    used: list[tuple[str, object]] = []

    def started(name: str) -> Callable[..., mock.Mock]:
        def start(tensor: Tensor, peer: int, group: object) -> mock.Mock:
            used.append((name, group))
            return mock.Mock()

        return start

    for name in ("isend", "irecv"):
        monkeypatch.setattr(dist, name, started(name))
    ways: tuple[Any, Any] = ("up", "down")
    boundary, wires = Boundary((2, 3), torch.float32), Channels(*ways, timedelta(seconds=1))
    activation, gradient = Message("x", 0, 0, 1, 1), Message("g", 0, 1, 0, 0)
    for stage, (sent, received) in enumerate([(activation, gradient), (gradient, activation)]):
        used.clear()
        messenger = Messenger(wires, range(2), CPU)
        messenger.send(sent, (torch.zeros(2, 3),), boundary)
        messenger.post(received, boundary)
        assert used == list(zip(("isend", "irecv"), ways if stage == 0 else reversed(ways), strict=True))


#: What crosses from stage 0 to stage 1: odd, even, and none at all; the second of each two rows is the sender's secret.
CROSSING = [(shape, secret) for shape in [(3, 1), (2, 3), (5, 4), (0, 2)] for secret in (False, True)]


def share_messages(rank: int, world: int) -> tuple[list[int], list[Any]]:
    """Two ranks on each of two stages: the numbers of values that this one sends, and what it receives."""
    topology = Topology(Sizes(tensor=2, pipeline=2), rank)
    groups, isend = create_groups(topology, timedelta(seconds=20)), dist.isend
    sharers = groups.parallel_group(topology, "tensor")
    messenger = Messenger(groups.channels, topology.peers("pipeline"), CPU, sharers=sharers)
    sent: list[int] = []

    def counted(tensor: Tensor, *arguments: Any, **named: Any) -> dist.Work | None:
        sent.append(tensor.numel())
        return isend(tensor, *arguments, **named)

    dist.isend = counted
    received = []
    messages = [Message("x", index, 0, 1, 1) for index in range(len(CROSSING))]
    boundaries = [Boundary((None, shape[1]) if secret else shape, torch.float32) for shape, secret in CROSSING]
    if topology.stage == 0:
        for message, boundary, (shape, _) in zip(messages, boundaries, CROSSING, strict=True):
            values = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape[1], shape[0]).t()
            messenger.send(message, (values,), boundary)
        messenger.flush()
    else:
        for message, boundary in zip(messages, boundaries, strict=True):
            messenger.post(message, boundary)
        received = [tensor for message in messages for tensor in messenger.wait(message)]
    return sent, [[list(tensor.shape), tensor.tolist()] for tensor in received]


@pytest.mark.multiproc
def test_peers_send_equal_parts_of_a_message_and_all_of_one_that_they_do_not_divide() -> None:
    first, second, *receivers = run_ranks(share_messages, 4)
    assert first[0] == second[0] == [3, 1, 3, 3, 1, 3, 10, 1, 10, 0, 1, 0]
    whole = [torch.arange(rows * columns).view(columns, rows).t() for (rows, columns), _ in CROSSING]
    for _, received in receivers:
        assert received == [[list(tensor.shape), tensor.tolist()] for tensor in whole]


def test_of_a_shared_message_its_sender_keeps_no_more_than_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    work, channel = mock.Mock(), mock.Mock()
    monkeypatch.setattr(dist, "isend", lambda *_, **__: work)
    wires = Channels(channel, channel, timedelta(seconds=4))
    messenger = Messenger(wires, [5, 6], CPU, sharers=ParallelGroup(index=1, size=2))
    output = torch.randn(4, 6)
    whole = StorageWeakRef(output.untyped_storage())
    messenger.send(Message("x", 0, 0, 1, 1), (output,), Boundary((4, 6), torch.float32))
    del output
    assert len(messenger._sent) == 1
    assert whole.expired()


def test_a_sender_that_is_lost_is_named_where_its_header_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On NCCL waiting does not stop the host: what is lost shows in the copy of the sizes."""
    group = mock.Mock()
    messenger = Messenger(Channels(group, group, timedelta(seconds=4)), [5, 6], CPU)
    monkeypatch.setattr(dist, "irecv", mock.Mock())
    message = Message("x", 0, 0, 1, 1)
    messenger.post(message, Boundary((None, 2), torch.float64))
    monkeypatch.setattr(Tensor, "tolist", mock.Mock(side_effect=RuntimeError("the watchdog found a time-out")))
    with pytest.raises(RankLostError, match=r"rank 5 \(stage 0\) is lost: .* while exchanging the activation"):
        messenger.wait(message)


class OpenEnded(ToyChunk):
    """A chunk whose output no backward reads: only the executor could keep it."""

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        out = super().forward(x, microbatch)
        return out if out.x is None else ChunkOut(out.x * 1.5)


class Watched(Messenger):
    """Knows which tensors that crossed to or from this stage still hold memory.

    ``peak`` is the most at once, ``outlived`` names sent tensors that were retired and still held memory then.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.storages: dict[Message, StorageWeakRef] = {}
        self.peak, self.retired, self.outlived = 0, 0, list[str]()

    def _watch(self, message: Message, tensor: Tensor) -> None:
        self.storages[message] = StorageWeakRef(tensor.untyped_storage())
        self.peak = max(self.peak, sum(not storage.expired() for storage in self.storages.values()))

    def post(self, message: Message, boundary: Boundary, *, one_order: bool = False) -> None:
        super().post(message, boundary, one_order=one_order)
        self._watch(message, self._posted[message][0].tensor)

    def send(self, message: Message, tensors: tuple[Tensor, ...], boundary: Boundary) -> None:
        super().send(message, tensors, boundary)
        self._watch(message, tensors[0])

    def retire(self, messages: Iterable[Message]) -> None:
        super().retire(messages)
        self.retired += len(tuple(messages))
        self.outlived += [str(message) for message in messages if not self.storages[message].expired()]


def memory_of_messages(rank: int, world: int, counts: tuple[int, ...]) -> list[tuple[int, int, list[str]]]:
    """Of 1F1B, by the microbatches of a step: the most messages whose memory this stage holds at once, how many it
    retires, which outlive that.
    """
    wires, found = channels(rank, world), []
    for microbatches in counts:
        messenger = Watched(wires, range(world), CPU)
        Bench(one_forward_one_backward(world, microbatches), rank, messenger, make_chunk=OpenEnded).run()
        found.append((messenger.peak, messenger.retired, messenger.outlived))
    return found


@pytest.fixture(scope="module")
def memory() -> list[list[tuple[int, int, list[str]]]]:
    """For 6, 8 and 48 microbatches what each of three stages says."""
    return [list(stages) for stages in zip(*run_ranks(memory_of_messages, 3, (6, 8, 48)), strict=True)]


@pytest.mark.multiproc
def test_the_memory_of_a_sent_output_is_free_once_it_is_retired_though_its_backward_is_to_come(memory: Any) -> None:
    """In 1F1B over three stages the first gradient that returns retires two outputs, long before the second's."""
    assert [(retired, outlived) for _, retired, outlived in memory[1]] == [(8, []), (16, []), (8, [])]


@pytest.mark.multiproc
def test_the_memory_of_messages_does_not_grow_with_the_microbatches(memory: Any) -> None:
    few, _, many = ([peak for peak, _, _ in stages] for stages in memory)
    assert few == many
    assert max(few) < 8
