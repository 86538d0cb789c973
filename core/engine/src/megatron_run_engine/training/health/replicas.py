"""Compares the copies of each parameter, by a hash, and says on which ranks they differ.

Three kinds of copies are updated by the same numbers and therefore equal bit for bit: data-parallel replicas,
parameters replicated over tensor-parallel ranks, and the copies of a tied parameter. If they differ, a memory, a link
or a kernel has failed, or a plugin forgets to sum over ranks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import ParamInfo
    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.training.build import Assembly

#: Values hashed per block, 8 bytes each: as many as a CPU cache holds, and as many as keep a GPU busy.
_IN_CACHE, _AT_ONCE = 2**18, 2**24
#: The integer type of a value's bits, by its size in bytes.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The first tensor whose copies are not all equal, and how many more such tensors there are.

    ``ranks`` differ from the majority, ``agree`` is the majority. Without a majority the wrong copy is unknown:
    ``agree`` is then empty and ``ranks`` holds all ranks.
    """

    tensor: str
    ranks: tuple[int, ...]
    agree: tuple[int, ...]
    more: int

    @property
    def minority(self) -> tuple[int, ...]:
        """``ranks``, if more than half of all agree on another copy; else nobody."""
        return self.ranks if len(self.agree) > len(self.ranks) else ()

    def __str__(self) -> str:
        rest = f", and so do {self.more} more tensors" if self.more > 1 else ", and so does 1 more" if self.more else ""
        if not self.agree:
            return f"the copies of {self.tensor} on {ranks_text(self.ranks)} differ{rest}: no copy has a majority"
        verb = "holds" if len(self.ranks) == 1 else "hold"
        return f"{ranks_text(self.ranks)} {verb} another {self.tensor} than {ranks_text(self.agree)}{rest}"


def compare_replicas(
    assembly: Assembly, ranks: Ranks, *, deterministic: bool, more: Mapping[str, Tensor] = MappingProxyType({})
) -> Difference | None:
    """Compare all copies of all parameters. Collective over the world; every rank gets the same answer.

    With ``deterministic`` kernels, tensor-parallel ranks compute equal gradients for replicated parameters. Without
    them these copies may drift apart by rounding, so only those are compared whose gradients are summed over the ranks.
    ``more`` hashes are compared before those of parameters, by their labels.
    """
    hashes: dict[str, Tensor] = {**more}
    tensor_rank = assembly.context.topology.tensor_rank
    for parameter, info in assembly.values():
        own = 0 if deterministic or info.partial_over == "tensor" else tensor_rank
        hashes[_label(info, own)] = content_hash(parameter)
    numbers = torch.stack(list(hashes.values())).tolist() if hashes else []  # one copy to the host for all
    notes = ranks.gather(json.dumps(dict(zip(hashes, numbers, strict=True))))
    found = find_difference([json.loads(note) for note in notes]) if ranks.rank == 0 else None
    answer = json.loads(ranks.broadcast(json.dumps(found and vars(found))))
    return answer and Difference(answer["tensor"], tuple(answer["ranks"]), tuple(answer["agree"]), answer["more"])


def find_difference(notes: Sequence[Mapping[str, int]]) -> Difference | None:
    """Return the first difference among the hashes of all ranks, in the tensor order of the lowest rank."""
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
    """Return a hash of the bits of ``tensor``, int64 [] on its device.

    The hash is the sum over i of (value i as an integer) * (2 i + 1), modulo 2^64. A single flipped bit always changes
    it: an odd number times a power of two below 2^64 is not 0 modulo 2^64. ``block`` values are hashed at once.
    """
    block = block or (_IN_CACHE if tensor.device.type == "cpu" else _AT_ONCE)
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_BITS[flat.element_size()])
    odd = torch.arange(1, 2 * min(block, len(bits)) + 1, 2, device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), block):
        some = bits[start : start + block].to(torch.int64, copy=True)
        # value i of the block has weight 2 (start + i) + 1 = 2 start + odd[i]
        total += some.sum() * (2 * start)
        total += some.mul_(odd[: len(some)]).sum()
    return total


def bit_sum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of the bits of ``tensors`` as integers of 8 bytes, modulo 2^64, int64 [] on ``device``.

    As a single flipped bit changes it, it tells whether a rank has the weights that it had, for a fraction of what
    :func:`content_hash` costs. That also knows their places, which tells apart copies that are not the same.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        start = min(-flat.storage_offset() % 8, len(flat))  # whole integers begin where memory lets them
        end = start + (len(flat) - start) // 8 * 8
        for part in (flat[:start], flat[start:end].view(torch.int64), flat[end:]):
            if len(part):
                total += part.sum()
    return total


def _label(info: ParamInfo, own: int) -> str:
    """Return a key that is equal on all ranks whose copies are to be compared.

    The text before ``#`` is for people: the parameter, and where this rank's part of it starts. Then follow the first
    logical tensor, since ranks hold different experts under one name, and ``own``, which tells apart copies that are
    not compared.
    """
    first = info.parts[0]
    whole = not first.start and not first.column
    return f"{info.name}{'' if whole else f'[{first.start}:, {first.column}:]'}#{first.name}#{own}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 and 2``, ``ranks 0, 1 and 2``."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
