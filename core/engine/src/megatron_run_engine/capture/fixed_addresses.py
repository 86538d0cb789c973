"""The facts on which graphs at fixed addresses rely, and how they have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from megatron_run_engine.runtime.gradients import has_main_grad, main_grad

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import Region
    from megatron_run.contracts.schedule import Action


@dataclass(frozen=True)
class FixedAddresses:
    """The actions of a step, where parameters and their gradients lie, and which parameters are trained."""

    actions: tuple[Action, ...]
    addresses: Mapping[Parameter, tuple[int, int]]
    trained: frozenset[Parameter]

    @classmethod
    def of(cls, regions: Sequence[Region], actions: Sequence[Action]) -> Self:
        """Take them as they are now, for a step of ``actions``."""
        parameters = {parameter for region in regions for segment in region.segments for parameter in segment.params}
        return cls(
            tuple(actions),
            {parameter: _addresses(parameter) for parameter in parameters},
            frozenset(parameter for parameter in parameters if parameter.requires_grad),
        )

    def changed(self, actions: Sequence[Action]) -> str:
        """Tell what has changed for a step of ``actions``; empty if nothing has."""
        if self.actions != tuple(actions):
            return f"a step of {_microbatches(actions)} microbatches follows steps of {_microbatches(self.actions)}"
        moved = sum(_addresses(parameter) != places for parameter, places in self.addresses.items())
        if moved:
            return f"{moved} parameters or their gradients were moved in memory"
        changed = sum(parameter.requires_grad != (parameter in self.trained) for parameter in self.addresses)
        return f"{changed} parameters were frozen, or are trained again" if changed else ""


def _addresses(parameter: Parameter) -> tuple[int, int]:
    return parameter.data_ptr(), main_grad(parameter).data_ptr() if has_main_grad(parameter) else 0


def _microbatches(actions: Sequence[Action]) -> int:
    return len({action.microbatch for action in actions if action.op == "F"})
