"""A step of each rank of a large world on one CPU, as it runs over NCCL, with torch's fake process group.

The fake group returns at once and communicates nothing, so a rank needs no other: its values are wrong, and everything
else is as over NCCL. What a rank calls is recorded, and the calls of all ranks are then played as NCCL would.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from megatron_run.errors import ExitCode
from megatron_run.planning import ResolvedRun
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.runtime.world import StopRequest, World
from megatron_run_engine.training.trainer import Trainer, train_rank


class Call(NamedTuple):
    """An operation on a communicator: for a message with the ``peer``; ``values`` is 0 where ranks may differ."""

    operation: str
    values: int
    dtype: str
    peer: int = -1


@dataclass
class Seen:
    """What a rank did: the groups that it made, in order, and its calls by communicator, in order.

    A communicator is named by its ranks and by how many of the same ranks were made before it.
    """

    made: list[tuple[int, ...]] = field(default_factory=list)
    calls: dict[tuple[tuple[int, ...], int], list[Call]] = field(default_factory=dict)
    skipped: list[bool] = field(default_factory=list)


#: Collectives that the engine calls -> which argument is filled, and may hold anything before: it is zeroed here, since
#: the fake group fills nothing, and a NaN would skip the update.
FILLED = {
    "all_gather_single": 0,
    "all_gather_into_tensor": 0,
    "reduce_scatter_single": 0,
    "reduce_scatter_tensor": 0,
    "all_to_all_single": 0,
    "all_reduce": None,
    "reduce": None,
    "broadcast": None,
}


def step_of(rank: int, world: int, run: ResolvedRun) -> Seen:
    """Build ``rank`` of ``world`` over a fake NCCL, and train one step."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    seen, hook = Seen(), sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with recorded(seen, world), tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "logs" / "attempt-001").mkdir(parents=True)
            place = World(rank, world, rank, world, backend="nccl")
            # What comes before the step and after it reads texts and sums on the host, and they are wrong.
            with (
                mock.patch.object(Trainer, "_check_evaluate_save", return_value=None),
                mock.patch.object(Trainer, "resume", return_value=1),
            ):
                assert train_rank(run, place, RunFolder(Path(folder), 1, rank), StopRequest()) is ExitCode.DONE
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # which the group has replaced
    return seen


@contextmanager
def recorded(seen: Seen, world: int) -> Iterator[None]:
    """Within, calls of ``torch.distributed`` are noted in ``seen``."""
    recorder = _Recorder(seen, world)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(dist, "new_group", recorder.make_group))
        for name, filled in FILLED.items():
            if original := getattr(dist, name, None):
                patches.enter_context(mock.patch.object(dist, name, recorder.collective(name, filled, original)))
        patches.enter_context(mock.patch.object(dist, "gather", recorder.gather))
        for name in ("isend", "irecv"):
            patches.enter_context(mock.patch.object(dist, name, recorder.message(name, getattr(dist, name))))
        yield


class _Recorder:
    """Stands in for functions of ``torch.distributed``: notes each call, and makes it."""

    def __init__(self, seen: Seen, world: int) -> None:
        everyone = tuple(range(world))
        self._seen, self._new_group, self._made = seen, dist.new_group, Counter([everyone])
        self._names: dict[Any, tuple[tuple[int, ...], int]] = {dist.group.WORLD: (everyone, 0)}

    def make_group(self, ranks: list[int], **options: Any) -> Any:
        assert not options.get("use_local_synchronization"), "over NCCL all ranks make every group"
        made, members = self._new_group(ranks, **options), tuple(ranks)
        self._seen.made.append(members)
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            self._names[made] = (members, self._made[members])
        self._made[members] += 1
        return made

    def collective(self, name: str, filled: int | None, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if filled is not None:
                arguments[filled].zero_()
            sizes = [each.numel() for each in arguments if isinstance(each, Tensor)]
            values = 0 if name == "all_to_all_single" else max(sizes)
            self._note(Call(name, values, str(arguments[0].dtype)), options["group"])
            # Sizes follow from what the others sent, here this rank's own: the fake group would find that they differ.
            return None if name == "all_to_all_single" else original(*arguments, **options)

        return call

    def gather(self, tensor: Tensor, found: list[Tensor] | None, dst: int, group: Any) -> None:
        """Every rank's is this rank's: the texts that are gathered must be texts. Their agreed size is faked too."""
        self._note(Call("gather", 0, str(tensor.dtype)), group)
        for each in found or ():
            each.copy_(tensor)

    def message(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, peer: int, group: Any) -> Any:
            if name == "irecv":
                tensor.zero_()
            self._note(Call(name, tensor.numel(), str(tensor.dtype), peer), group)
            return original(tensor, peer, group=group)

        return call

    def _note(self, call: Call, group: Any) -> None:
        assert group in self._names, "torch would take the whole world"
        self._seen.calls.setdefault(self._names[group], []).append(call)


def play(ranks: Sequence[Seen]) -> Counter[str]:
    """Play the calls of all ranks as NCCL does, and count them: a call runs when it is the next one of all concerned.

    Each communicator is played alone. Over several, what waits for what follows from streams, which are not recorded.
    Raises :class:`AssertionError` for calls that do not match, and for ranks that would wait for ever.
    """
    played: Counter[str] = Counter()
    queues = {
        communicator: {rank: deque(ranks[rank].calls.get(communicator, ())) for rank in communicator[0]}
        for communicator in {each for seen in ranks for each in seen.calls}
    }
    for communicator, waiting in queues.items():
        while any(waiting.values()):
            done = _collective(communicator, waiting) or _message(waiting)
            assert done, f"ranks wait for ever on {communicator}: { {r: q[0] for r, q in waiting.items() if q} }"
            played[done] += 1
    return played


def _collective(communicator: object, waiting: Mapping[int, deque[Call]]) -> str:
    heads = [calls[0] if calls else None for calls in waiting.values()]
    if any(head is None or head.peer >= 0 for head in heads):
        return ""
    assert len(set(heads)) == 1, f"{communicator}: {sorted(set(heads))}"  # type: ignore[type-var]  # none is None
    for calls in waiting.values():
        calls.popleft()
    return heads[0].operation if heads[0] else ""


def _message(waiting: Mapping[int, deque[Call]]) -> str:
    """The next message of which both ends are at the head of their queues."""
    for rank, calls in waiting.items():
        if calls and calls[0].operation == "isend":
            send = calls[0]
            other = waiting[send.peer]
            if other and other[0].operation == "irecv" and other[0].peer == rank:
                assert other[0][1:3] == send[1:3], f"{rank} sends {send}, {send.peer} expects {other[0]}"
                calls.popleft()
                other.popleft()
                return "message"
    return ""
