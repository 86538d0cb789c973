"""How ranks save and load together: they exchange texts, and if one rank fails, all raise its error."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from megatron_run.errors import CheckpointError, RunError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run_engine.runtime.comm import Groups

T = TypeVar("T")


class Ranks(Protocol):
    """All ranks of a run, seen from one of them."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def gather(self, text: str) -> Sequence[str]:
        """Return the texts of all ranks on rank 0, nothing on the others. Collective."""
        ...

    def broadcast(self, text: str) -> str:
        """Return rank 0's text on every rank. Collective."""
        ...


class WorldRanks:
    """All ranks of a process group.

    Texts travel as bytes. Unlike ``gather_object``, which unpickles, nothing that arrives can execute code.
    """

    def __init__(self, groups: Groups, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._groups, self._device = groups, device

    def gather(self, text: str) -> Sequence[str]:
        """Return the texts of all ranks on rank 0."""
        if self.size == 1:
            return [text]
        data = self._bytes(text)
        # A gather needs equal sizes: agree on the longest text and pad the others to it.
        longest = int(self._groups.max_(torch.tensor([len(data)], device=self._device), "world").item())
        padded = torch.nn.functional.pad(data, (0, longest - len(data)), value=_PADDING)
        found = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        self._groups.gather_(padded, found)
        return [_text(each) for each in found or ()]

    def broadcast(self, text: str) -> str:
        """Return rank 0's text on every rank: first its length is broadcast, then its bytes."""
        data = self._bytes(text)
        length = self._groups.broadcast_(torch.tensor([len(data)], device=self._device), 0, "world")
        if self.rank:
            data = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        return _text(self._groups.broadcast_(data, 0, "world"))

    def _bytes(self, text: str) -> Tensor:
        content = bytearray(text.encode() or [_PADDING])
        return torch.frombuffer(content, dtype=torch.uint8).to(self._device)


#: A byte that UTF-8 never contains.
_PADDING = 0xFF


def _text(data: Tensor) -> str:
    return data.cpu().numpy().tobytes().rstrip(bytes([_PADDING])).decode()


def on_rank0(ranks: Ranks, work: Callable[[], str], cause: Exception | None = None) -> str:
    """Run ``work`` on rank 0 and return its result on every rank. Collective.

    An error on rank 0 is raised on every rank, on the others as a :class:`CheckpointError` from ``cause``, this rank's
    own error, if any.
    """
    if ranks.rank:
        answer = json.loads(ranks.broadcast(""))
        if answer["failure"]:
            raise CheckpointError(**answer["failure"]) from cause
        return str(answer["result"])
    try:
        result = work()
    except BaseException as error:  # also KeyboardInterrupt: the other ranks already wait in the broadcast
        error.__cause__ = error.__cause__ or cause
        ranks.broadcast(json.dumps({"failure": as_note(error)}))
        raise
    ranks.broadcast(json.dumps({"failure": None, "result": result}))
    return result


def on_all_ranks(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run ``work`` on every rank. Return this rank's result once all have succeeded. Collective.

    If any rank fails, all raise a :class:`CheckpointError` with the error of the lowest rank.
    """
    result: list[T] = []  # a list, since T may be None
    failure: Exception | None = None
    try:
        result.append(work())
    except Exception as error:  # any error: the other ranks already wait in the gather
        failure = error
    notes = ranks.gather(json.dumps(as_note(failure) if failure else None))
    on_rank0(ranks, lambda: raise_first(notes), failure)
    return result[0]


def raise_first(notes: Sequence[str]) -> str:
    """Raise the failure of the lowest rank that failed, if any. ``notes`` are JSON texts, by rank.

    The error's origin names the rank, unless all ranks failed with the same error.
    """
    failures = [json.loads(note) for note in notes]
    alike = all(failure == failures[0] for failure in failures)
    for rank, failure in enumerate(failures):
        if failure:
            origin = failure["origin"] if alike else ", ".join(filter(None, (failure["origin"], f"rank {rank}")))
            raise CheckpointError(**{**failure, "origin": origin})
    return ""


def as_note(error: BaseException, what: str = "") -> dict[str, str]:
    """Return an error as JSON data, for other ranks to raise. ``what`` describes errors that are no ``RunError``."""
    if isinstance(error, RunError):
        return {"what": error.what, "why": error.why, "origin": error.origin, "fix": error.fix}
    why = f"{type(error).__name__}: {error}" if what else str(error)
    return {"what": what or type(error).__name__, "why": why, "origin": "", "fix": ""}
