"""Whether the ranks that hold the same weights still do: a hash of each parameter, compared over all ranks.

Data-parallel replicas, what tensor-parallel ranks all hold whole, and the copies of a tied parameter are updated by the
same numbers, so they are equal bit for bit. Where they are not, a memory, a link or a kernel has failed.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from megatron_run.contracts import ParamInfo
    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.training.build import Assembly

#: Values that are hashed at once, 8 bytes each: as many as a cache holds, on a GPU as many as keep it busy.
_IN_CACHE, _AT_ONCE = 2**18, 2**24
#: The integers that have the bits of a value, by its bytes.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The first tensor of which not all copies are equal, and how many more there are.

    ``ranks`` are those whose copy differs from the one that most have, ``agree`` the others. Where no copy has a
    majority nobody knows who is right: then ``agree`` is empty, and ``ranks`` are all.
    """

    tensor: str
    ranks: tuple[int, ...]
    agree: tuple[int, ...]
    more: int

    def __str__(self) -> str:
        rest = f", and so do {self.more} more tensors" if self.more > 1 else ", and so does 1 more" if self.more else ""
        if not self.agree:
            return f"the copies of {self.tensor} on {_ranks(self.ranks)} differ{rest}: no copy has a majority"
        verb = "holds" if len(self.ranks) == 1 else "hold"
        return f"{_ranks(self.ranks)} {verb} another {self.tensor} than {_ranks(self.agree)}{rest}"


def compare_replicas(assembly: Assembly, ranks: Ranks, *, deterministic: bool) -> Difference | None:
    """Compare all copies of all parameters. Collective over the world; every rank gets the same answer.

    ``deterministic``: kernels give the same bits on every rank, so that what each tensor-parallel rank computes by
    itself is equal too. Else those copies may drift apart by rounding, and are compared only where their gradients are
    summed.
    """
    hashes: dict[str, Tensor] = {}
    tensor_rank = assembly.context.topology.tensor_rank
    for described in assembly.infos:
        for parameter, info in described.items():
            own = 0 if deterministic or info.partial_over == "tensor" else tensor_rank
            hashes[_label(info, own)] = content_hash(parameter)
    numbers = torch.stack(list(hashes.values())).tolist() if hashes else []
    notes = ranks.gather(json.dumps(dict(zip(hashes, numbers, strict=True))))
    found = find_difference([json.loads(note) for note in notes]) if ranks.rank == 0 else None
    told = json.loads(ranks.tell(json.dumps(found and vars(found))))
    return told and Difference(told["tensor"], tuple(told["ranks"]), tuple(told["agree"]), told["more"])


def find_difference(notes: Sequence[Mapping[str, int]]) -> Difference | None:
    """The first difference among the hashes of all ranks, in the order of the lowest rank that has the tensor."""
    held: dict[str, dict[int, int]] = {}
    for rank, note in enumerate(notes):
        for key, number in note.items():
            held.setdefault(key, {})[rank] = number
    differing = [(key, copies) for key, copies in held.items() if len(set(copies.values())) > 1]
    if not differing:
        return None
    key, copies = differing[0]
    (most, votes), *others = Counter(copies.values()).most_common()
    majority = votes > others[0][1]
    agree = tuple(rank for rank, number in copies.items() if majority and number == most)
    odd = tuple(rank for rank in copies if rank not in agree)
    return Difference(key.partition("#")[0], odd, agree, len(differing) - 1)


@torch.no_grad()
def content_hash(tensor: Tensor, block: int | None = None) -> Tensor:
    """A hash of the bits of ``tensor``, int64 [] on its device: the sum of value i, as an integer, times 2 i + 1.

    Modulo 2^64. A single flipped bit always changes it, since an odd number times a power of two below 2^64 is not 0.
    ``block`` values are hashed at once.
    """
    block = block or (_IN_CACHE if tensor.device.type == "cpu" else _AT_ONCE)
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_BITS[flat.element_size()])
    odd = torch.arange(1, 2 * min(block, len(bits)) + 1, 2, device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), block):
        some = bits[start : start + block].to(torch.int64, copy=True)
        total += some.sum() * (2 * start)
        total += some.mul_(odd[: len(some)]).sum()
    return total


def _label(info: ParamInfo, own: int) -> str:
    """What copies of the same values are called on every rank that holds one, of those that are compared at all.

    The parameter and where its part of it starts, for people; then which logical tensor begins it, for ranks that hold
    others under one name, as experts, and ``own``, for copies that are not compared.
    """
    first = info.parts[0]
    whole = not first.start and not first.column
    return f"{info.name}{'' if whole else f'[{first.start}:, {first.column}:]'}#{first.name}#{own}"


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 and 2``, ``ranks 0, 1 and 2``."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
