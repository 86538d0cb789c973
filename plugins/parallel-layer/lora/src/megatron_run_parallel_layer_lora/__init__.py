"""Parallel layers ``lora``: low-rank adapters on the linear layers of the factory below (Hu et al. 2021).

A frozen matrix W [o, i] acts as ``W + alpha / rank * B A``: A [r, i] starts as PEFT's, uniform in +-1/sqrt(i), and B
[o, r] with zeros, so that training starts at the model as it was. Both are made of layers of the factory below, which
knows how W is split: ``layers`` says how.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import Adapters, ParallelLayers, PluginInfo, StackedLayers
from megatron_run.errors import InputError
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.data import AT_COMMAS
from megatron_run_engine.runtime import canonical
from megatron_run_parallel_layer_lora.layers import DOWN, UP, LoraColumn, LoraRow, LowRank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from megatron_run.contracts import LinearSpec
    from megatron_run_engine.runtime import BuildContext

#: The word that stands for every linear layer.
ALL = "all"


class Options(BaseModel):
    """The options in section ``parallel-layer``. The defaults are PEFT's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(8, ge=1, description="inner size of an adapter")
    alpha: float = Field(8.0, gt=0, description="adapters are multiplied by alpha / rank")
    adapter_dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input of adapters")
    targets: Annotated[tuple[str, ...], AT_COMMAS] = Field(
        ("query", "value"), description="matrices to adapt, by the ends of their names, as attention.output; or all"
    )


class LoraLayers(StackedLayers):
    """Makes linear layers with adapters; everything else is as ``base`` makes it, and all of ``base``'s is frozen."""

    def __init__(self, context: BuildContext, options: Options, base: ParallelLayers) -> None:
        super().__init__(base)
        self._context, self._targets = context, options.targets
        self._how = LowRank(options.rank, options.alpha / options.rank, options.adapter_dropout)

    def column_linear(self, spec: LinearSpec, norm: nn.Module | None = None) -> nn.Module:
        """A column-parallel layer with an adapter for each part."""
        wrapped = self.base.column_linear(spec)
        return LoraColumn(self._context, self.base, wrapped, spec, norm, self._how)

    def row_linear(self, spec: LinearSpec) -> nn.Module:
        """A row-parallel layer with an adapter."""
        wrapped = self.base.row_linear(spec)
        return LoraRow(self._context, self.base, wrapped, spec, self._how)

    def finish(self, chunk: nn.Module) -> None:
        """Keep the adapters that ``targets`` name, and freeze everything else."""
        self.base.finish(chunk)
        for parameter in chunk.parameters():
            parameter.requires_grad_(False)
        for path, layer in _adaptable(chunk):
            adapted = {name for name in layer.names(path) if any(t == ALL or _ends(name, t) for t in self._targets)}
            for parameter in layer.keep(path, adapted):
                parameter.requires_grad_(True)

    def check_names(self, chunks: Sequence[nn.Module]) -> None:
        """Raise :class:`InputError` for a target that no linear layer of any rank has. Collective over the world."""
        self.base.check_names(chunks)
        here = [name for chunk in chunks for path, layer in _adaptable(chunk) for name in layer.names(path)]
        names = [*chain.from_iterable(self._context.groups.gather_names(here, self._context.device))]
        for target in self._targets:
            if target != ALL and not any(_ends(name, target) for name in names):
                known = dict.fromkeys(name.partition(".")[2].partition(".")[2] for name in names)
                raise InputError(
                    f"parallel-layer.targets names {target!r}, which no linear layer is called",
                    fix=f"choose all, or the end of one of these: {', '.join(known)}",
                )

    def adapters(self) -> Adapters:
        """How a saved adapter is merged."""
        return Adapters("lora", DOWN, UP, self._how.rank, self._how.scale, self._how.dropout)


def _adaptable(chunk: nn.Module) -> list[tuple[str, LoraColumn | LoraRow]]:
    """The layers of ``chunk`` whose matrices can be adapted, by the paths that parameters' names begin with."""
    found = chunk.named_modules()
    return [(canonical(path), layer) for path, layer in found if isinstance(layer, LoraColumn | LoraRow)]


def _ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("parallel-layer", "lora", options=Options)


@hookimpl
def megatron_run_create_parallel_layer(context: BuildContext, options: Options, base: ParallelLayers) -> ParallelLayers:
    """Stack adapters on ``base``."""
    return LoraLayers(context, options, base)
