"""The memory of an update rule from one step to the next, besides its state of single tensors.

A rule may keep numbers in its ``param_groups``, as schedule-free rules and Prodigy do. Those that its steps change are
saved with every tensor of the group, in fields that begin with :data:`GROUP`. Texts and lists cannot be saved, and
attributes of the rule's object are not looked for in a saved step: the first are refused, the second told, when a step
makes them, since a run that resumes would go on otherwise without a word.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_run.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Before the name of a group's number in the name of its field: ``group.k``.
GROUP = "group."
#: Keys of a group that each step sets, or that tell which tensors are in it.
_GIVEN = frozenset({"params", "lr", "weight_decay", "megatron_run"})
#: Attributes of every optimizer of torch, of which the first two are saved.
_OF_TORCH = frozenset({"state", "param_groups", "defaults"})


@runtime_checkable
class ListsFields(Protocol):
    """A ``ReadState`` that can say what was saved: so a rule gets back what it made after its first step too."""

    def shapes(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all fields of the logical tensor ``name``; none if this rule's state starts anew."""
        ...


class GroupNumbers:
    """The numbers in the groups of ``optimizer``, which has taken no step yet."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._initial = [{key: _copy(value) for key, value in _own(group).items()} for group in self._groups]
        self._index = {each: index for index, group in enumerate(self._groups) for each in group["params"]}

    def changed(self, parameter: Parameter) -> dict[str, Any]:
        """Values that steps have changed in the group of ``parameter``, by key; nothing if it is in none."""
        index = self._index.get(parameter)
        if index is None:
            return {}
        initial = self._initial[index]
        return {
            key: value
            for key, value in _own(self._groups[index]).items()
            if key not in initial or not _same(value, initial[key])
        }

    def set(self, parameter: Parameter, key: str, saved: Tensor) -> None:
        """Give ``key`` of the group of ``parameter`` its saved value, in the type that it had at first."""
        index = self._index.get(parameter)
        if index is not None:
            _put(self._groups[index], key, restored(saved, parameter.device, self._initial[index].get(key)))

    def reset(self) -> None:
        """Make all groups what they were before the first step."""
        for group, initial in zip(self._groups, self._initial, strict=True):
            for key in _own(group).keys() - initial.keys():
                del group[key]
            for key, value in initial.items():
                _put(group, key, _copy(value))


class RuleWatch:
    """Looks at an imported ``rule`` after each of its steps for what no saved step would hold."""

    def __init__(self, rule: str, optimizer: Optimizer, numbers: GroupNumbers, warn: Callable[[str], None]) -> None:
        self._rule, self._optimizer, self._numbers, self._warn = rule, optimizer, numbers, warn
        self._before = _marks(optimizer)
        self._reported: set[str] = set()

    def after_step(self) -> None:
        """Tell of attributes that the step has changed. Raises :class:`InputError` for state that cannot be saved."""
        for owner, state in self._optimizer.state.items():
            if not isinstance(owner, Tensor):
                self._refuse(f"state[{owner!r}]", "it belongs to no parameter")
            self._check(state, "state")
        for group in self._optimizer.param_groups:
            if not all(_is_number(value) for value in _own(group).values()):
                self._check(self._numbers.changed(group["params"][0]), "param_groups")
        self._tell(_marks(self._optimizer))

    def _tell(self, now: dict[str, object]) -> None:
        changed = {name for name in now if now[name] != self._before.get(name)} - self._reported
        self._before = now
        self._reported |= changed
        if changed:
            what = f"optimizer.rule={self._rule}: steps change its attribute {', '.join(sorted(changed))}"
            fix = "keep it in self.state[parameter] or self.param_groups"
            self._warn(f"{what}, which is not saved, so a resumed run may go on otherwise: {fix}")

    def _check(self, values: Mapping[str, Any], place: str) -> None:
        for key, value in values.items():
            if not _is_number(value):
                self._refuse(f"{key} in {place}", f"it is of type {type(value).__name__}")

    def _refuse(self, what: str, why: str) -> None:
        raise InputError(
            f"optimizer.rule={self._rule} keeps {what}, which cannot be saved",
            why=f"{why}, and a saved step holds tensors and numbers of parameters",
            fix="keep a tensor or a number in self.state[parameter] or self.param_groups",
        )


def saved_form(value: Any) -> Tensor:
    """``value`` as it is saved: a number of Python's in 64 bits, so that none of them is lost."""
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.as_tensor(value)


def restored(saved: Tensor, device: torch.device, like: Any = None) -> Any:
    """``saved`` as the rule had it: of the type of ``like``, or if that is None a number again if it has its form.

    A tensor of the rule's own has no dimensions and 64 bits only in odd cases; it then returns as a number.
    """
    if isinstance(like, Tensor):
        return saved.to(like, copy=True)
    number = saved.ndim == 0 and saved.dtype in (torch.float64, torch.int64, torch.bool)
    if number or isinstance(like, bool | int | float):
        found = saved.item()
        # Where nothing was saved 0.0 is read for a count of steps; and a rule may go from 3 to 3.5.
        return type(like)(found) if isinstance(like, int) and found == found // 1 else found
    return saved.to(device, copy=True)


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    """Set ``key`` of ``group``; a tensor in place, since groups may share the one that they were made with."""
    now = group.get(key)
    if isinstance(now, Tensor) and isinstance(value, Tensor) and (now.shape, now.dtype) == (value.shape, value.dtype):
        now.detach().copy_(value)
    else:
        group[key] = value


def _own(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _GIVEN}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, Tensor | bool | int | float)


def _marks(optimizer: Optimizer) -> dict[str, object]:
    """A mark of each attribute that differs once it has changed, by its name."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH}
    return {
        name: mark
        for name, value in own.items()
        if (mark := _mark(value)) is not None
        and not (isinstance(value, Optimizer) and value.state is optimizer.state)  # a rule in it, whose state is saved
    }


def _mark(value: Any) -> object:
    match value:
        case Parameter():
            return None  # a weight, which every step changes and every step saves
        case Tensor():
            return id(value), value._version
        case Optimizer():
            return len(value.state)
        case bool() | int() | float() | str():
            return repr(value)  # NaN is not equal to itself
        case list() | tuple() | set() | deque():
            return len(value), *(repr(each) for each in value if isinstance(each, bool | int | float | str))
        case dict():
            return len(value), *(repr(each) for each in value.values() if isinstance(each, bool | int | float | str))
        case _:
            return None
