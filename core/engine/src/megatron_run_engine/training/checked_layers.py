"""Checks that every layer of a factory declares a ``ParameterSpec`` for each of its parameters."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from megatron_run.contracts import ParallelLayers, StackedLayers
from megatron_run.errors import PluginError
from megatron_run_engine.runtime.parameter_init import unspecified

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

#: The methods of a factory that make a layer.
LAYER_METHODS = (
    "column_linear",
    "row_linear",
    "vocab_embedding",
    "output_layer",
    "norm",
    "dropout",
    "core_attention",
    "cross_entropy",
    "expert_column_linear",
    "expert_row_linear",
)


class CheckedLayers(StackedLayers):
    """Passes on the layers of ``base``. Raises :class:`PluginError` for a parameter without ``parameter_specs``.

    Such a layer would train, but with an undefined initialisation, and with a wrong gradient where its gradient is a
    partial sum, as under sequence parallelism. ``name`` is the factory's name in errors.
    """

    def __init__(self, base: ParallelLayers, name: str) -> None:
        super().__init__(base)
        self._name = name

    def check(self, method: str, layer: nn.Module) -> nn.Module:
        """Return ``layer``, made by ``method``. Raises :class:`PluginError` if it lacks a spec."""
        if missing := unspecified(layer):
            raise PluginError(
                f"{method} of {self._name} returned {type(layer).__name__}, which does not say what {missing} is",
                why="parameter_specs, a dict on the module that owns a parameter, say how it starts, and over which "
                "ranks its gradient is a part of a sum",
                fix=f'set self.parameter_specs = {{"{missing.rpartition(".")[2]}": ParameterSpec(Init(...))}} there',
            )
        return layer


def _checked(method: str) -> Callable[..., nn.Module]:
    """Return ``method`` of ``StackedLayers`` with its result checked."""
    make: Callable[..., nn.Module] = getattr(StackedLayers, method)

    @wraps(make)
    def made_and_checked(self: CheckedLayers, *arguments: Any, **options: Any) -> nn.Module:
        return self.check(method, make(self, *arguments, **options))

    return made_and_checked


# One loop instead of ten methods that differ in nothing but their signatures. The type checker sees the inherited ones.
for _method in LAYER_METHODS:
    setattr(CheckedLayers, _method, _checked(_method))
