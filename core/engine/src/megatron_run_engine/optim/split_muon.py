"""Muon (Jordan et al. 2024) of matrices of which each tensor-parallel rank holds rows or columns.

Momentum is of each value, so it stays where the value is. The orthogonalisation needs whole matrices: each is put
together on one rank, its owner, which does the work, and the result goes back in parts, in bf16 as it is computed. A
step sends two messages for all matrices of a group of hyperparameters, and owners share them by the work they make.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_run.errors import InputError
from megatron_run_engine.optim.newton_schulz import batches, orthogonalised
from megatron_run_engine.runtime.comm import ALONE

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron_run.contracts import Part
    from megatron_run_engine.runtime.comm import ParallelGroup

#: torch's Muon refuses as many iterations, in its first step.
_MOST_STEPS = 100


class Split(NamedTuple):
    """A matrix of ``shape``, of which each peer holds equal parts along ``dim``; only rank ``owner`` has it whole."""

    shape: tuple[int, int]
    dim: int
    owner: int


class SplitMuon(torch.optim.Muon):
    """torch's Muon; of matrices that :meth:`split` names each rank holds a part."""

    def __init__(self, params: Any, **arguments: Any) -> None:
        super().__init__(params, **arguments)
        steps = self.defaults["ns_steps"]
        if not isinstance(steps, int) or not 0 < steps < _MOST_STEPS:
            raise ValueError(f"ns_steps is {steps!r}, and should be an integer from 1 to {_MOST_STEPS - 1}")
        self._splits: Mapping[Tensor, Split] = {}
        self._peers: ParallelGroup = ALONE

    def split(self, parts: Mapping[Parameter, Part], peers: ParallelGroup) -> None:
        """From now on put together what ``peers`` hold in parts: ``parts`` are the logical matrices of parameters.

        Raises :class:`InputError` for one that the peers do not hold in equal parts.
        """
        found = {p: (part.shape, dim) for p, part in parts.items() if (dim := _cut(p, part, peers.size)) is not None}
        loads = [0] * peers.size
        owners = {}
        # The largest first; ranks agree, since they hold the same matrices in the same order.
        for parameter, (shape, _) in sorted(found.items(), key=lambda item: _work(item[1][0]), reverse=True):
            owners[parameter] = loads.index(min(loads))
            loads[owners[parameter]] += _work(shape)
        self._splits = {p: Split((shape[0], shape[1]), dim, owners[p]) for p, (shape, dim) in found.items()}
        self._peers = peers

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch's own
        """As torch's, but for matrices of one shape together, and for those that ranks hold in parts."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            members = [parameter for parameter in group["params"] if parameter.grad is not None]
            whole = [parameter for parameter in members if parameter not in self._splits]
            for batch in batches(whole):
                self._step_batch(group, [whole[index] for index in batch])
            if cut := [parameter for parameter in members if parameter in self._splits]:
                self._step_together(group, cut)
        return loss

    def _step_batch(self, group: Mapping[str, Any], members: Sequence[Parameter]) -> None:
        """Update ``members``, which this rank has whole and which have one shape."""
        directions = [self._direction(group, parameter) for parameter in members]
        if group["lr"]:
            _move(group, zip(members, members, orthogonalised(directions, group), strict=True))

    def _step_together(self, group: Mapping[str, Any], members: Sequence[Parameter]) -> None:
        """Update ``members``, of which each peer has a part."""
        ways = [self._splits[parameter] for parameter in members]
        directions = [self._direction(group, parameter) for parameter in members]
        if not group["lr"]:
            return  # nothing moves, as when state alone is to be made: nothing is sent
        wholes = self._gather(directions, ways)
        found = [wholes[index] for index in range(len(wholes))]
        for batch in batches(wholes):
            for index, result in zip(batch, orthogonalised([wholes[index] for index in batch], group), strict=True):
                found[index] = result
        _move(group, zip(members, ways, self._scatter(found, members), strict=True))

    def _direction(self, group: Mapping[str, Any], parameter: Parameter) -> Tensor:
        """This rank's part of what is to be orthogonalised: the momentum, Nesterov's if asked for."""
        gradient, momentum = parameter.grad, group["momentum"]
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer: Tensor = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum) if group["nesterov"] else buffer

    def _gather(self, parts: Sequence[Tensor], ways: Sequence[Split]) -> list[Tensor]:
        """The whole matrices that this rank owns, from all peers' ``parts``."""
        peers = self._peers
        by_owner: list[list[Tensor]] = [[] for _ in range(peers.size)]
        for part, way in zip(parts, ways, strict=True):
            by_owner[way.owner].append(part.reshape(-1))
        sizes = [sum(map(len, each)) for each in by_owner]
        sent = torch.cat([part for each in by_owner for part in each])
        received = peers.exchange(sent, sizes, [sizes[peers.index]] * peers.size).view(peers.size, -1)
        wholes, start = [], 0
        for part, way in zip(parts, ways, strict=True):
            if way.owner == peers.index:
                found = received[:, start : start + part.numel()].view(peers.size, *part.shape)
                wholes.append(torch.cat([*found], way.dim))
                start += part.numel()
        return wholes

    def _scatter(self, wholes: Sequence[Tensor], members: Sequence[Parameter]) -> list[Tensor]:
        """The parts of all matrices for this rank, from the ``wholes`` of their owners."""
        peers, ways = self._peers, [self._splits[parameter] for parameter in members]
        own = iter(wholes)
        owned = [next(own).chunk(peers.size, way.dim) for way in ways if way.owner == peers.index]
        sent = [each[peer].reshape(-1) for peer in range(peers.size) for each in owned]
        sizes = [0] * peers.size
        for parameter, way in zip(members, ways, strict=True):
            sizes[way.owner] += parameter.numel()
        empty = members[0].new_empty(0, dtype=torch.bfloat16)
        received = peers.exchange(torch.cat([*sent, empty]), [sizes[peers.index]] * peers.size, sizes)
        starts = [sum(sizes[:owner]) for owner in range(peers.size)]
        parts = []
        for parameter, way in zip(members, ways, strict=True):
            start = starts[way.owner]
            parts.append(received[start : start + parameter.numel()].view(parameter.shape))
            starts[way.owner] += parameter.numel()
        return parts


def _cut(parameter: Parameter, part: Part, peers: int) -> int | None:
    """The dimension along which ``peers`` hold equal parts of a matrix; None if each holds all of it."""
    rows, columns = parameter.shape
    if (rows, columns) == part.shape:
        return None
    for dim, parts in enumerate(((rows * peers, columns), (rows, columns * peers))):
        if parts == part.shape:
            return dim
    raise InputError(
        f"optimizer.rule=muon updates whole matrices, and tensor-parallel ranks hold unequal parts of {part.name}",
        why=f"one of {peers} ranks has {rows} x {columns} of {part.shape[0]} x {part.shape[1]}",
        fix=f"leave it to adamw: --set optimizer.adamw_for={part.name}",
    )


def _move(group: Mapping[str, Any], changes: Iterable[tuple[Parameter, Parameter | Split, Tensor]]) -> None:
    """Decay each parameter, and move it against its orthogonalised direction; the whole matrix's shape says how far."""
    lr = group["lr"]
    for parameter, whole, change in changes:
        factor = _factor(group["adjust_lr_fn"], whole.shape)
        parameter.mul_(1 - lr * group["weight_decay"]).add_(change, alpha=-lr * factor)


def _factor(kind: str | None, shape: Sequence[int]) -> float:
    """The factor on the rate for a matrix of ``shape``: Jordan et al. 2024, or Liu et al. 2025, section 2.2."""
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(shape))
    return math.sqrt(max(1.0, shape[0] / shape[1]))


def _work(shape: Sequence[int]) -> int:
    """Of orthogonalising a matrix, in proportion: its products are with the smaller dimension."""
    return shape[0] * shape[1] * min(shape)
