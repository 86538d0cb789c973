"""Checks that every layer of a factory declares a ``ParameterSpec`` for each of its parameters."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import nn

from megatron_run.contracts import ParallelLayers, StackedLayers
from megatron_run.errors import PluginError, RunError
from megatron_run.registry.loaded_plugin import in_one_line, said_type
from megatron_run_engine.runtime.parameter_init import unspecified

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """Passes on the layers of ``base``. Raises :class:`PluginError` for a layer that breaks its contract.

    That is what is no layer, what cannot be made, and a parameter without ``parameter_specs``: it would train, but with
    an undefined initialisation, and with a wrong gradient where its gradient is a partial sum, as under sequence
    parallelism. ``name`` is the factory's name in errors.
    """

    def __init__(self, base: ParallelLayers, name: str) -> None:
        super().__init__(base)
        self._name = name

    def check(self, method: str, layer: nn.Module) -> nn.Module:
        """Return ``layer``, made by ``method``. Raises :class:`PluginError` if it is no layer, or lacks a spec."""
        if not isinstance(layer, nn.Module) or "_modules" not in vars(layer):
            without = f"a {type(layer).__name__} without nn.Module.__init__" if isinstance(layer, nn.Module) else ""
            raise self.failed(method, f"it returned {without or said_type(layer)}, and must return a torch.nn.Module")
        if missing := unspecified(layer):
            raise PluginError(
                f"{method} of {self._name} returned {type(layer).__name__}, which does not say what {missing} is",
                why="parameter_specs, a dict on the module that owns a parameter, say how it starts, and over which "
                "ranks its gradient is a part of a sum",
                fix=f'set self.parameter_specs = {{"{missing.rpartition(".")[2]}": ParameterSpec(Init(...))}} there',
            )
        return layer

    def failed(self, method: str, why: str) -> PluginError:
        """Return the error of what ``method`` of the factory did."""
        return PluginError(
            f"{self._name}: {method} failed",
            why=why,
            fix="correct the plugin, or see the whole cause with --debug",
        )


def _checked(method: str) -> Callable[..., nn.Module]:
    """Return ``method`` of ``StackedLayers`` with its result checked."""
    make: Callable[..., nn.Module] = getattr(StackedLayers, method)

    @wraps(make)
    def made_and_checked(self: CheckedLayers, *arguments: Any, **options: Any) -> nn.Module:
        try:
            layer = make(self, *arguments, **options)
        except (RunError, MemoryError):
            raise
        except (AttributeError, LookupError, TypeError) as cause:  # what the code of a plugin raises, not torch
            missing = getattr(cause, "name", "") == "base"
            hint = "; call super().__init__(base) in the factory's __init__" if missing else ""
            raise self.failed(method, in_one_line(cause) + hint) from cause
        return self.check(method, layer)

    return made_and_checked


# One loop instead of ten methods that differ in nothing but their signatures. The type checker sees the inherited ones.
for _method in LAYER_METHODS:
    setattr(CheckedLayers, _method, _checked(_method))
