"""The tensors that operators are given and return, beside numbers, in tuples, lists and dictionaries.

torch's ``pytree`` finds them too, in trees of any classes. Below the dispatcher there are no others, and each operation
of a capture is looked at several times: this takes a fifth of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def tensors_in(values: object) -> list[Tensor]:
    """The tensors of ``values``, in their order."""
    found: list[Tensor] = []
    _collect(values, found)
    return found


def _collect(values: object, found: list[Tensor]) -> None:
    if isinstance(values, Tensor):
        found.append(values)
    elif isinstance(values, (tuple, list)):
        for each in values:
            _collect(each, found)
    elif isinstance(values, dict):
        for each in values.values():
            _collect(each, found)


def with_tensors(values: Any, change: Callable[[Tensor], object]) -> Any:
    """``values`` with each tensor replaced by what ``change`` makes of it, in their order; all others stay."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, list):
        return [with_tensors(each, change) for each in values]
    if isinstance(values, tuple):
        return tuple([with_tensors(each, change) for each in values])
    if isinstance(values, dict):
        return {key: with_tensors(each, change) for key, each in values.items()}
    return values
