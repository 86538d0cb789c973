"""The loops of Megatron-style pipelines, written with their nine operations: what the kernel's lists are compared with.

Each loop yields, for one stage, what it computes and what it calls. ``parts`` takes an operation apart by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_run.contracts.schedule import Action

OPERATIONS = (
    "recv_forward",
    "recv_backward",
    "send_forward",
    "send_backward",
    "send_forward_recv_backward",
    "send_backward_recv_forward",
    "send_forward_recv_forward",
    "send_backward_recv_backward",
    "send_forward_backward_recv_forward_backward",
)


class Call(NamedTuple):
    """One call: the sends are of the results of ``sent``, the receives are the inputs of ``received``."""

    operation: str
    sent: tuple[Action, ...] = ()
    received: tuple[Action, ...] = ()


def parts(operation: str) -> dict[str, list[str]]:
    """``send_forward_recv_backward`` -> ``{"send": ["forward"], "recv": ["backward"]}``."""
    taken: dict[str, list[str]] = {"send": [], "recv": []}
    verb = ""
    for word in operation.split("_"):
        if word in taken:
            verb = word
        else:
            taken[verb].append(word)
    return taken


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> Iterator[Action | Call]:
    """1F1B with one chunk a stage."""
    forwards = [Action("F", m, 0) for m in range(microbatches)]
    backwards = [Action("B", m, 0) for m in range(microbatches)]
    warmup = min(stages - stage - 1, microbatches)
    for forward in forwards[:warmup]:
        yield Call("recv_forward", received=(forward,))
        yield forward
        yield Call("send_forward", sent=(forward,))
    steady = list(zip(forwards[warmup:], backwards, strict=False))
    if steady:
        yield Call("recv_forward", received=(steady[0][0],))
    for index, (forward, backward) in enumerate(steady):
        yield forward
        yield Call("send_forward_recv_backward", (forward,), (backward,))
        yield backward
        if index + 1 < len(steady):
            yield Call("send_backward_recv_forward", (backward,), (steady[index + 1][0],))
        else:
            yield Call("send_backward", sent=(backward,))
    for backward in backwards[len(steady) :]:
        yield Call("recv_backward", received=(backward,))
        yield backward
        yield Call("send_backward", sent=(backward,))


def interleaved(stage: int, stages: int, chunks: int, microbatches: int) -> Iterator[Action | Call]:
    """Interleaved 1F1B in groups of as many microbatches as there are stages, without overlap of messages."""
    visits = sorted(
        ((m, chunk) for m in range(microbatches) for chunk in range(chunks)),
        key=lambda visit: (visit[0] // stages, visit[1], visit[0]),
    )
    forwards = [Action("F", m, chunk) for m, chunk in visits]
    backwards = [Action("B", m, chunks - 1 - chunk) for m, chunk in visits]
    warmup = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(visits))
    remaining = len(visits) - warmup
    fused = "send_forward_backward_recv_forward_backward"
    yield Call("recv_forward", received=_at(forwards, 0))
    for k in range(warmup):
        yield forwards[k]
        if k == warmup - 1 and remaining:
            received = (*_at(forwards, k + 1), *_at(backwards, 0))
            yield Call(fused, (forwards[k],), received)
        else:
            yield Call("send_forward_recv_forward", (forwards[k],), _at(forwards, k + 1))
    for k in range(remaining):
        yield forwards[warmup + k]
        yield backwards[k]
        sent = (forwards[warmup + k], backwards[k])
        received = (*_at(forwards, warmup + k + 1), *_at(backwards, k + 1))
        yield Call(fused, sent, received)
    if not remaining:
        yield Call("recv_backward", received=_at(backwards, 0))
    for k in range(remaining, len(visits)):
        yield backwards[k]
        yield Call("send_backward_recv_backward", (backwards[k],), _at(backwards, k + 1))


def _at(actions: Sequence[Action], index: int) -> tuple[Action, ...]:
    return tuple(actions[index : index + 1])
