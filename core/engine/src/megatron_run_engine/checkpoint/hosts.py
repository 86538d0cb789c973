"""Which ranks share a host, and which files of a step travel between hosts. Pure functions of ranks' notes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Transfer(NamedTuple):
    """A file of ``size`` bytes that rank ``source`` sends to rank ``target``."""

    file: str
    size: int
    source: int
    target: int


@dataclass(frozen=True)
class Hosts:
    """The ``ranks`` of each host. Hosts stand in the order of their lowest rank, which leads its host."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def seeing(cls, tokens: Sequence[str]) -> Hosts:
        """The hosts of ranks that see these ``tokens`` in their memory: who sees the same one is on the same host."""
        found: dict[str, list[int]] = {}
        for rank, token in enumerate(tokens):
            found.setdefault(token, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    @cached_property
    def _places(self) -> Mapping[int, int]:
        return {rank: host for host, ranks in enumerate(self.ranks) for rank in ranks}

    def host_of(self, rank: int) -> int:
        """The number of the host of ``rank``."""
        return self._places[rank]

    def beside(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of ``rank``, itself among them."""
        return self.ranks[self._places[rank]]

    def leads(self, rank: int) -> bool:
        """Whether ``rank`` leads its host."""
        return self.beside(rank)[0] == rank

    def share(self, rank: int, each: Iterable[T]) -> list[T]:
        """The part of ``each`` that ``rank`` does of its host's work: all is dealt to the ranks of the host."""
        beside = self.beside(rank)
        return list(each)[beside.index(rank) :: len(beside)]

    def neighbour(self, rank: int) -> int | None:
        """The rank on the next host that keeps a copy of what ``rank`` saves; None where there is one host."""
        if len(self.ranks) == 1:
            return None
        host = self._places[rank]
        beyond = self.ranks[(host + 1) % len(self.ranks)]
        return beyond[self.ranks[host].index(rank) % len(beyond)]

    def copies(self, files: Mapping[str, int], owners: Mapping[str, int]) -> list[Transfer]:
        """The transfers of a save: each of ``files``, by its size, from its owner to that rank's neighbour."""
        placed = ((file, size, owners[file], self.neighbour(owners[file])) for file, size in files.items())
        return [Transfer(file, size, owner, target) for file, size, owner, target in placed if target is not None]

    def fetches(
        self, files: Mapping[str, int], needed: Sequence[Collection[str]], held: Sequence[Collection[str]]
    ) -> list[Transfer]:
        """The transfers of a restart: what a host ``needed`` of ``files`` and has not, from one that ``held`` it.

        The work is dealt to the ranks of both hosts.
        """
        found = []
        for host, names in enumerate(needed):
            for number, file in enumerate(sorted(set(names) - set(held[host]))):
                holder = next(each for each, has in enumerate(held) if file in has)
                source, target = (self.ranks[each][number % len(self.ranks[each])] for each in (holder, host))
                found.append(Transfer(file, files[file], source, target))
        return found
