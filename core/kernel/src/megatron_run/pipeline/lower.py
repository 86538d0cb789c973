"""Lowers a plan to one stage's instructions: what to receive, compute, send and retire, and when. No torch.

Three rules make any legal plan safe on a transport that matches messages in order, without tags:

- On a directed channel (source, target), receives are posted in the order in which the **source sends**, never in the
  order of use, so the n-th receive always meets the n-th send.
- A message inside a stage never touches the transport: its source equals its target, and it is not posted or retired.
- A send is retired (waited for) at the first receive of a message that the target produced after it had consumed the
  sent one. Until then the executor keeps its buffer. Sends without such a proof are retired at the end of the step.

``prove_pairing`` proves that every send meets its receive, for all channels of a plan at once. The layout alone
determines which stage produces a message and which one consumes it, so a message determines its channel. Two properties
of a plan's global order are proven; lowering relies on nothing else:

- The order contains each stage's list completely and in the order of that list. So the order of two sends of a stage in
  it is the order in which the stage sends.
- Every message is produced once and then consumed once, or neither. So on each directed channel the needed receives are
  exactly the sends, and receives that are posted in the order of the sends, each no later than its use, meet them one
  by one.

Lowering checks that a stage's program does post them so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Literal, NamedTuple

from megatron_run.contracts.schedule import Action, Place
from megatron_run.errors import ScheduleError
from megatron_run.pipeline.plan import Plan, positions

#: The state of a message: not produced yet, produced, consumed.
_UNSENT, _SENT, _RECEIVED = range(3)

#: operation -> chunk -> (message it consumes, message it produces), both for microbatch 0; None where there is none.
_Messages = dict[str, list[tuple[int | None, int | None]]]


def check_pairing(
    layout: Sequence[Place],
    microbatches: int,
    lists: Sequence[Sequence[Action]],
    order: Sequence[tuple[int, int]],
) -> None:
    """Raise :class:`ScheduleError` unless ``order``, (stage, index in its list) of each action, pairs all messages.

    Messages are integers for speed, since plans of half a million actions are common: the activation of microbatch
    ``m`` into position ``k`` is ``(2k)*M + m``, the gradient out of it ``(2k+1)*M + m``. Position 0 has neither.
    """
    messages = _messages(layout, microbatches, len(lists))
    state = bytearray(2 * len(layout) * microbatches)
    heads = [0] * len(lists)
    for stage, index in order:
        if index != heads[stage]:
            raise ScheduleError(f"the global order has action {index} of stage {stage} where {heads[stage]} comes next")
        heads[stage] = index + 1
        op, microbatch, chunk = lists[stage][index]
        if op not in "FBI":
            continue
        receives, sends = messages[stage][op][chunk]
        if receives is not None:
            if state[receives + microbatch] != _SENT:
                raise _misused(stage, index, lists, state[receives + microbatch])
            state[receives + microbatch] = _RECEIVED
        if sends is not None:
            if state[sends + microbatch] != _UNSENT:
                raise ScheduleError(f"{_action(stage, index, lists)} sends a message that was sent before")
            state[sends + microbatch] = _SENT
    if heads != [len(actions) for actions in lists]:
        raise ScheduleError(f"the global order has {len(order)} of {sum(map(len, lists))} actions")
    if state.count(_SENT):
        raise ScheduleError(f"{state.count(_SENT)} messages are sent and never received")


def _messages(layout: Sequence[Place], microbatches: int, stages: int) -> list[_Messages]:
    """The messages that each stage's actions consume and produce."""
    chunks = 1 + max(place.chunk for place in layout)
    table: list[_Messages] = [{op: [(None, None)] * chunks for op in "FBI"} for _ in range(stages)]
    for position, place in enumerate(layout):
        here, after = ((2 * each * microbatches) for each in (position, position + 1))
        into = here if position else None
        onward = after if position + 1 < len(layout) else None
        row = table[place.stage]
        row["F"][place.chunk] = into, onward
        for op in "BI":
            row[op][place.chunk] = (
                None if onward is None else onward + microbatches,
                None if into is None else into + microbatches,
            )
    return table


def _misused(stage: int, index: int, lists: Sequence[Sequence[Action]], state: int) -> ScheduleError:
    """The error for an action whose message was consumed before, or is not produced yet."""
    why = "was received before" if state == _RECEIVED else "was not sent yet"
    return ScheduleError(f"{_action(stage, index, lists)} needs a message that {why}")


def _action(stage: int, index: int, lists: Sequence[Sequence[Action]]) -> str:
    return f"stage {stage}, action {index}: {lists[stage][index]}"


class Message(NamedTuple):
    """The messages that one stage, ``source``, sends to another, ``target``, for a microbatch.

    ``x`` is an activation sent forward, ``g`` a gradient sent backward, and where the model has some, the tensors
    beside it; ``position`` is the layout position that consumes it. If ``source == target``, it passes between two
    chunks of one stage.
    """

    kind: Literal["x", "g"]
    microbatch: int
    source: int
    target: int
    position: int

    @property
    def local(self) -> bool:
        """Whether the message stays inside one stage and never touches the transport."""
        return self.source == self.target

    def __str__(self) -> str:
        name = {"x": "activation", "g": "gradient"}[self.kind]
        return f"the {name} of microbatch {self.microbatch} from stage {self.source} to stage {self.target}"


#: For each source, the messages that it sends to one stage, in the source's order.
_Channels = dict[int, list[Message]]


class Instruction(NamedTuple):
    """One action with its messages, in the order in which an executor carries them out.

    ``post``: start these receives, in this order; none is local. ``receive``: wait for this message, posted here or
    earlier, or take it from this stage if it is local. ``retire``: wait for these earlier sends; they are proven
    consumed now, so the wait cannot block. ``action``: compute it. ``send``: send its result, or keep it for this stage
    if it is local. ``sync``: the chunk's gradients are complete, so start their reduction. ``one_order``: each of
    ``post`` is at its place in the plan's global message order, and must not be postponed.
    """

    post: tuple[Message, ...]
    receive: Message | None
    action: Action
    send: Message | None
    retire: tuple[Message, ...]
    sync: bool
    one_order: bool


def lower(plan: Plan, stage: int, lookahead: int | None = 1) -> tuple[Instruction, ...]:
    """The instructions of ``stage``, for training plans and forward-only plans.

    A receive is posted at most ``lookahead`` actions before its message, or a later one on the same channel, is needed.
    That is safe where each direction between two stages is a separate channel (gloo). With ``lookahead=None`` each
    receive is posted at its place in the plan's global message order instead (``Instruction.one_order``). That is safe
    even where one stream carries all messages of a stage, in both directions (NCCL).

    In both cases the program is checked: on each channel into ``stage`` the posts equal the sends, in order, and each
    post comes no later than its use. Otherwise this raises :class:`ScheduleError`; a verified plan never does.
    """
    wires = _Wires(plan.layout)
    actions = plan.lists[stage]
    one_order = lookahead is None
    channels = _channels(plan, wires, stage)
    posts = (
        _posts_in_order(plan, wires, stage)
        if lookahead is None
        else _posts_ahead(wires, stage, actions, channels, lookahead)
    )
    retired = _retired(plan, wires, stage)
    syncs = _sync_points(actions)
    program = tuple(
        Instruction(
            posts[index],
            wires.received(stage, action),
            action,
            wires.sent(stage, action),
            retired[index],
            index in syncs,
            one_order,
        )
        for index, action in enumerate(actions)
    )
    _check_posts(program, channels)
    return program


class _Wires:
    """The message that each action receives and sends, derived from the layout alone."""

    def __init__(self, layout: Sequence[Place]) -> None:
        self.layout = layout
        self.position_of = positions(layout)

    def neighbours(self, stage: int) -> list[int]:
        """The other stages with a position next to one of ``stage``: those with which it exchanges messages."""
        pairs = [(a.stage, b.stage) for a, b in pairwise(self.layout)]
        near = {b if a == stage else a for a, b in pairs if stage in (a, b)}
        return sorted(near - {stage})

    def received(self, stage: int, action: Action) -> Message | None:
        """The message that ``action`` of ``stage`` needs: the previous position's activation or the next's gradient."""
        position = self.position_of[stage, action.chunk]
        return self._into(action, position)

    def sent(self, stage: int, action: Action) -> Message | None:
        """The message that ``action`` of ``stage`` produces for the next position, or for the previous one."""
        position = self.position_of[stage, action.chunk]
        return self._into(action, position + 1 if action.op == "F" else position - 1)

    def _into(self, action: Action, position: int) -> Message | None:
        """The message into ``position`` in the direction of ``action``; None at the ends of the layout."""
        if action.op not in "FBI":
            return None
        kind: Literal["x", "g"] = "x" if action.op == "F" else "g"
        origin = position - 1 if kind == "x" else position + 1
        if min(origin, position) < 0 or max(origin, position) >= len(self.layout):
            return None
        return Message(kind, action.microbatch, self.layout[origin].stage, self.layout[position].stage, position)


def _channels(plan: Plan, wires: _Wires, stage: int) -> _Channels:
    """For each neighbour, the messages that it sends to ``stage``, in the neighbour's order."""
    channels: _Channels = {}
    for source in wires.neighbours(stage):
        sent = (wires.sent(source, action) for action in plan.lists[source])
        channels[source] = [message for message in sent if message and message.target == stage]
    return channels


def _check_posts(program: Sequence[Instruction], channels: _Channels) -> None:
    """Raise :class:`ScheduleError` unless ``program`` posts all messages of ``channels``, in order and in time."""
    posted: dict[int, list[Message]] = {source: [] for source in channels}
    known: set[Message] = set()
    for step in program:
        known.update(step.post)
        for message in step.post:
            posted[message.source].append(message)
        if step.receive and not step.receive.local and step.receive not in known:
            raise ScheduleError(f"{step.action} needs {step.receive}, which is not posted by then")
    for source, sent in channels.items():
        for turn, (post, send) in enumerate(zip_longest(posted[source], sent)):
            if post != send:
                raise ScheduleError(f"message {turn} from stage {source} is {send}, and the receive is for {post}")


def _posts_ahead(
    wires: _Wires, stage: int, actions: Sequence[Action], channels: _Channels, lookahead: int
) -> list[tuple[Message, ...]]:
    """Per action, the receives to post: all of the channel up to those needed within the next ``lookahead`` actions."""
    turn = {message: index for channel in channels.values() for index, message in enumerate(channel)}
    posted = dict.fromkeys(channels, 0)
    posts = []
    for index in range(len(actions)):
        post: list[Message] = []
        for action in actions[index : index + 1 + lookahead]:
            message = wires.received(stage, action)
            if message in turn:
                source, until = message.source, turn[message] + 1
                post += channels[source][posted[source] : until]
                posted[source] = max(posted[source], until)
        posts.append(tuple(post))
    return posts


def _posts_in_order(plan: Plan, wires: _Wires, stage: int) -> list[tuple[Message, ...]]:
    """Per action, the receives whose sends are between the stage's previous action and this one in the global order."""
    posts: list[tuple[Message, ...]] = []
    arriving: list[Message] = []
    for source, index in plan.order:
        if source == stage:
            posts.append(tuple(arriving))
            arriving = []
            continue
        message = wires.sent(source, plan.lists[source][index])
        if message and message.target == stage:
            arriving.append(message)
    return posts


def _retired(plan: Plan, wires: _Wires, stage: int) -> list[tuple[Message, ...]]:
    """Per action, the earlier sends that its receive proves consumed.

    The peer consumed them in the action that sent the received message, or before.
    """
    consumed, produced = _peer_indices(plan, wires, stage)
    in_flight: list[Message] = []
    retired = []
    for action in plan.lists[stage]:
        proof, sent = wires.received(stage, action), wires.sent(stage, action)
        done: list[Message] = []
        if proof in produced:
            done = [m for m in in_flight if m.target == proof.source and consumed[m] <= produced[proof]]
            in_flight = [m for m in in_flight if m not in done]
        if sent in consumed:
            in_flight.append(sent)
        retired.append(tuple(done))
    return retired


def _peer_indices(plan: Plan, wires: _Wires, stage: int) -> tuple[dict[Message, int], dict[Message, int]]:
    """When peers consume the messages of ``stage``, and when they produce those for it, as indices in their lists."""
    consumed: dict[Message, int] = {}
    produced: dict[Message, int] = {}
    for peer in wires.neighbours(stage):
        for index, action in enumerate(plan.lists[peer]):
            received, sent = wires.received(peer, action), wires.sent(peer, action)
            if received and received.source == stage:
                consumed[received] = index
            if sent and sent.target == stage:
                produced[sent] = index
    return consumed, produced


def _sync_points(actions: Sequence[Action]) -> set[int]:
    """The indices at which a chunk's gradient sync starts: its S, or its last B or W if it has none."""
    last = {action.chunk: index for index, action in enumerate(actions) if action.op in "BW"}
    last |= {action.chunk: index for index, action in enumerate(actions) if action.op == "S"}
    return set(last.values())
