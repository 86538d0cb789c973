"""Applies an update rule to segments: ranges of a share whose values have the same hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from megatron_run.contracts import ParamInfo
    from megatron_run_engine.optim.sharding import Shard
    from megatron_run_engine.optim.update_rules import UpdateOptions, UpdateRule


class Group(NamedTuple):
    """The hyperparameters that values must share to be updated together."""

    decays: bool
    lr_mult: float
    by_rest: bool


@dataclass(frozen=True, eq=False)
class Segment:
    """Values ``world`` of the share's bucket as a parameter with its gradient, for an optimizer of PyTorch.

    The parameter is flat, or one logical tensor in its shape if the rule needs it whole.
    """

    share: Shard
    world: range
    group: Group
    values: Parameter

    @classmethod
    def of(cls, share: Shard, world: range, group: Group, shape: tuple[int, ...] = (-1,)) -> Segment:
        """Make the segment of ``world``. Its values and gradient are views of the share's."""
        values = Parameter(share.masters[share.local(world)].view(shape))
        values.grad = share.grads[share.local(world)].view(shape)
        return cls(share, world, group, values)


class Update:
    """Applies ``rule`` with ``options`` to ``shares``."""

    def __init__(self, shares: Sequence[Shard], rule: UpdateRule, options: UpdateOptions, device: torch.device) -> None:
        self._shares, self._rule, self._options, self._device = shares, rule, options, device
        self._begun = False
        cut = self._whole_tensors if self._rule.whole else self._runs
        self.segments = tuple(segment for share in shares for segment in cut(share))
        rules = {False: self._rule, True: self._rule.rest}
        self._optimizers = [
            rule.make(groups, device)
            for by_rest, rule in rules.items()
            if rule is not None and (groups := self._groups(by_rest=by_rest))
        ]

    def step(self, lr: float, weight_decay: float) -> None:
        """Update every segment, with ``weight_decay`` where its parameters decay."""
        self._begun = True
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["megatron_run"].lr_mult
                group["weight_decay"] = weight_decay if group["megatron_run"].decays else 0.0
            optimizer.step()

    def start(self) -> None:
        """Create the rule's state by a step that changes nothing, and reset its step counts.

        For a rule that ``starts_at_zero`` this is its initial state. For others the values are undefined.
        """
        for share in self._shares:
            share.grads.zero_()  # gradients of an earlier step might not be finite, and 0 * inf is nan
        self.step(0.0, 0.0)
        for segment in self.segments:
            state = self._state(segment)
            if "step" in state:
                state["step"] *= 0

    def forget(self) -> None:
        """Clear the state, as before the first step."""
        self._begun = False
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def begin(self) -> None:
        """Create the initial state before the first step, if the rule starts at zero."""
        if not self._begun and self._rule.starts_at_zero:
            self.start()

    def state(self, segment: Segment) -> dict[str, Any]:
        """Return the rule's state of ``segment`` by field, as PyTorch holds it."""
        return {field: value for field, value in self._state(segment).items() if value is not None}

    def set_state(self, segment: Segment, field: str, value: Any) -> None:
        """Replace a number of the rule's state. Tensors are copied into instead."""
        self._state(segment)[field] = value

    def _state(self, segment: Segment) -> dict[str, Any]:
        return next((each.state[segment.values] for each in self._optimizers if segment.values in each.state), {})

    def state_bytes(self) -> int | None:
        """Return the bytes of the rule's state; None for a rule that cannot step on the meta device."""
        if self._device.type == "meta":
            try:
                self.start()
            except RuntimeError:  # the rule reads values, which meta tensors do not have
                return None
        states = (self.state(segment).values() for segment in self.segments)
        return sum(value.nbytes for values in states for value in values if isinstance(value, Tensor))

    def _groups(self, *, by_rest: bool) -> list[dict[str, Any]]:
        members = [segment for segment in self.segments if segment.group.by_rest == by_rest]
        return [
            {"params": [segment.values for segment in members if segment.group == group], "megatron_run": group}
            for group in dict.fromkeys(segment.group for segment in members)
        ]

    def _group(self, info: ParamInfo, *, by_rest: bool = False) -> Group:
        return Group(info.decay, self._options.factor(info.name), by_rest)

    def _runs(self, share: Shard) -> Iterator[Segment]:
        """Yield the longest ranges of one group each."""
        for group, world in share.runs(self._group, share.updated):
            yield Segment.of(share, world, group)

    def _whole_tensors(self, share: Shard) -> Iterator[Segment]:
        """Yield each logical tensor. A rank has it whole or not at all."""
        if not share.updated:
            return
        for parameter, info in share.bucket.infos.items():
            row, columns = parameter.shape[1:].numel(), parameter.shape[1:]
            for part in info.parts:
                start = share.bucket.starts[parameter] + part.local.start * row
                by_rest = len(part.shape) != 2 or self._options.is_left_to_adamw(part.name)  # no hidden matrix
                group = self._group(info, by_rest=by_rest and self._rule.rest is not None)
                world = range(start, start + len(part.local) * row)
                yield Segment.of(share, world, group, (len(part.local), *columns))
