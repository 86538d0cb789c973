"""How the ranks of a run save and load together: they exchange texts, and where one fails all fail with its reason."""

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
    """The ranks of a run, from one of them."""

    @property
    def rank(self) -> int:
        """This one's number."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def gather(self, text: str) -> Sequence[str]:
        """On rank 0 the texts of all ranks, by rank; elsewhere nothing. Collective."""
        ...

    def tell(self, text: str) -> str:
        """Rank 0's text, on every rank. Collective."""
        ...


class Alone:
    """A world of one rank."""

    rank, size = 0, 1

    def gather(self, text: str) -> Sequence[str]:
        """The one text."""
        return [text]

    def tell(self, text: str) -> str:
        """The same text."""
        return text


class WorldRanks:
    """All ranks of a process group. Texts travel as bytes: no object does, so nothing that arrives can be executed."""

    def __init__(self, groups: Groups, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._groups, self._device = groups, device

    def gather(self, text: str) -> Sequence[str]:
        """On rank 0 the texts of all ranks; each travels padded to the longest."""
        if self.size == 1:
            return [text]
        data = self._bytes(text)
        longest = int(self._groups.max_(torch.tensor([len(data)], device=self._device), "world").item())
        padded = torch.nn.functional.pad(data, (0, longest - len(data)), value=_PADDING)
        found = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        self._groups.gather_(padded, found)
        return [_text(each) for each in found or ()]

    def tell(self, text: str) -> str:
        """Rank 0's text: its length first, then itself."""
        data = self._bytes(text)
        length = self._groups.broadcast_(torch.tensor([len(data)], device=self._device), 0, "world")
        if self.rank:
            data = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        return _text(self._groups.broadcast_(data, 0, "world"))

    def _bytes(self, text: str) -> Tensor:
        return torch.tensor(list(text.encode()) or [_PADDING], dtype=torch.uint8, device=self._device)


#: In no text: UTF-8 never holds this byte.
_PADDING = 0xFF


def _text(data: Tensor) -> str:
    return bytes(data.tolist()).rstrip(bytes([_PADDING])).decode()


def on_rank0(ranks: Ranks, work: Callable[[], str], cause: Exception | None = None) -> str:
    """What ``work`` returns on rank 0, on every rank. Collective.

    What it raises there is raised here too, as a :class:`CheckpointError`; ``cause`` is what this rank knows of it.
    """
    if ranks.rank:
        answer = json.loads(ranks.tell(""))
        if answer["failure"]:
            raise CheckpointError(**answer["failure"]) from cause
        return str(answer["said"])
    try:
        said = work()
    except BaseException as error:
        error.__cause__ = error.__cause__ or cause
        ranks.tell(json.dumps({"failure": as_note(error)}))
        raise
    ranks.tell(json.dumps({"failure": None, "said": said}))
    return said


def on_all_ranks(ranks: Ranks, work: Callable[[], T]) -> T:
    """What ``work`` returns on this rank, once it has gone well on every rank. Collective.

    Where it failed, all raise a :class:`CheckpointError` with the reason of the lowest rank.
    """
    result: list[T] = []
    failure: Exception | None = None
    try:
        result.append(work())
    except Exception as error:  # the others wait for a word from this rank, whatever happened to it
        failure = error
    notes = ranks.gather(json.dumps(as_note(failure) if failure else None))
    on_rank0(ranks, lambda: raise_first(notes), failure)
    return result[0]


def raise_first(notes: Sequence[str]) -> str:
    """Raise the failure of the lowest rank that has one; ``notes`` are JSON, by rank.

    The rank is named, unless all ranks failed alike.
    """
    failures = [json.loads(note) for note in notes]
    alike = all(failure == failures[0] for failure in failures)
    for rank, failure in enumerate(failures):
        if failure:
            origin = failure["origin"] if alike else ", ".join(filter(None, (failure["origin"], f"rank {rank}")))
            raise CheckpointError(**{**failure, "origin": origin})
    return ""


def as_note(error: BaseException, what: str = "") -> dict[str, str]:
    """An error as another rank can raise it again; ``what`` failed, where the error does not say it itself."""
    if isinstance(error, RunError):
        return {"what": error.what, "why": error.why, "origin": error.origin, "fix": error.fix}
    why = f"{type(error).__name__}: {error}" if what else str(error)
    return {"what": what or type(error).__name__, "why": why, "origin": "", "fix": ""}
