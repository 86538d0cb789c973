"""A simulated transport with NCCL's rules: messages match in order, without tags, and a send waits for its receive.

Each stage has a thread that issues sends and receives without waiting, and streams that carry them out in order. A
stream carries either one direction between two stages (``per_channel``, as gloo), or all messages of a stage
(``per_stage``, as NCCL with one communicator).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from megatron_run.pipeline.lower import Instruction, Message

#: The key of the stream that carries a message.
Streams = Callable[[Message], Hashable]


def per_channel(message: Message) -> Hashable:
    """One stream for each direction between two stages."""
    return message.source, message.target


def per_stage(_: Message) -> Hashable:
    """One stream for all messages of a stage."""
    return "all"


class SwappedMessageError(Exception):
    """A receive was matched with a message other than its own."""


class TransportDeadlockError(Exception):
    """No stage can continue."""


@dataclass
class _Stage:
    program: deque[Instruction]
    posted: bool = False
    streams: dict[Hashable, deque[tuple[str, Message]]] = field(default_factory=lambda: defaultdict(deque))
    arrived: set[Message] = field(default_factory=set)
    delivered: set[Message] = field(default_factory=set)
    local: set[Message] = field(default_factory=set)


def carry_out(programs: Sequence[Sequence[Instruction]], streams: Streams = per_channel) -> None:
    """Run the stages' programs, one each as :func:`megatron_run.pipeline.lower.lower` returns it, to their end.

    Raises :class:`SwappedMessageError` or :class:`TransportDeadlockError`, which state where.
    """
    stages = [_Stage(deque(program)) for program in programs]
    while any([_compute(stage, streams) for stage in stages] + [_match(stages, index) for index in range(len(stages))]):
        continue
    if any(stage.program or any(stage.streams.values()) for stage in stages):
        raise TransportDeadlockError("; ".join(map(_where, range(len(stages)), stages)))


def _where(number: int, stage: _Stage) -> str:
    """The action and message at which a stage is stuck."""
    if not stage.program:
        return f"stage {number} has computed everything"
    return f"stage {number} waits at {stage.program[0].action} for {stage.program[0].receive}"


def _compute(stage: _Stage, streams: Streams) -> bool:
    """Run instructions until one must wait; returns whether there was progress."""
    moved = False
    while stage.program:
        instruction = stage.program[0]
        if not stage.posted:
            for message in instruction.post:
                assert not message.local, f"{message} was posted"
                stage.streams[streams(message)].append(("receive", message))
            stage.posted = moved = True
        there = stage.local if instruction.receive and instruction.receive.local else stage.arrived
        if instruction.receive and instruction.receive not in there:
            break
        there.discard(instruction.receive)
        late = [message for message in instruction.retire if message not in stage.delivered]
        assert not late, f"retired at {instruction.action} before they were received: {late}"
        _send(stage, instruction.send, streams)
        stage.program.popleft()
        stage.posted, moved = False, True
    return moved


def _send(stage: _Stage, message: Message | None, streams: Streams) -> None:
    if message and message.local:
        stage.local.add(message)
    elif message:
        stage.streams[streams(message)].append(("send", message))


def _match(stages: Sequence[_Stage], source: int) -> bool:
    """Match sends at the heads of streams with receives at the heads of the other stages' streams."""
    moved = False
    for key, stream in stages[source].streams.items():
        while stream and stream[0][0] == "send":
            sent = stream[0][1]
            other = stages[sent.target].streams[key]
            if not other or other[0][0] != "receive" or other[0][1].source != source:
                break
            if other[0][1] != sent:
                raise SwappedMessageError(f"{sent} arrived where {other[0][1]} was expected")
            stream.popleft()
            other.popleft()
            stages[source].delivered.add(sent)
            stages[sent.target].arrived.add(sent)
            moved = True
    return moved
