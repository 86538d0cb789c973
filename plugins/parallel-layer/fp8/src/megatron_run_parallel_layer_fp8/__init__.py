"""Parallel layers ``fp8``: the linear layers of the factory below multiply in FP8, by PyTorch alone.

Weights, their masters and what passes between layers stay as they are: the operands of each product are rounded to 8
bits where it is computed, by a scale that is found there (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").
Experts, embeddings, the output layer, norms and attention are those of the factory below.

Reading order: ``quantized`` (values and their scales, a product of them), ``products`` (the three products of a layer),
``weights`` (what microbatches of a step share), ``cast`` (the passes over memory on a GPU).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_run.contracts import ParallelLayers, PluginInfo, StackedLayers
from megatron_run.errors import InputError, PluginError
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.nn import LinearLayer, triton_lack
from megatron_run_parallel_layer_fp8.products import FORMATS, Fp8Products, Options
from megatron_run_parallel_layer_fp8.quantized import MULTIPLE
from megatron_run_parallel_layer_fp8.weights import StepWeight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from megatron_run.contracts import LinearSpec
    from megatron_run.contracts.schema import Config
    from megatron_run_engine.runtime import BuildContext

_NO_MULTIPLE = f"are no multiples of {MULTIPLE}"
#: The first GPUs whose tensor cores multiply FP8: Ada (8.9) and Hopper (9.0).
_CAPABILITY = (8, 9)


class Fp8Layers(StackedLayers):
    """Gives the linear layers of ``base`` products in FP8; everything else is as ``base`` makes it."""

    def __init__(self, context: BuildContext, options: Options, base: ParallelLayers) -> None:
        super().__init__(base)
        self._context, self._options, self._log = context, options, context.log
        self._rounds = context.dtypes.param.itemsize == 2  # a model that is evaluated in fp32 keeps its weights' bits
        self._named = set[object]()  # of what a warning has told
        tokens = context.train.micro_batch_size * context.train.sequence_length
        if options.scaling == "tensorwise" and tokens % MULTIPLE:  # rowwise ones, which sum over tokens, never are
            self._warn(f"weight gradients are not in FP8: {tokens} tokens of a microbatch {_NO_MULTIPLE}")

    def column_linear(self, spec: LinearSpec, norm: nn.Module | None = None) -> nn.Module:
        """A column-parallel layer that multiplies in FP8."""
        return self._multiplying(self.base.column_linear(spec, norm))

    def row_linear(self, spec: LinearSpec) -> nn.Module:
        """A row-parallel layer that multiplies in FP8."""
        return self._multiplying(self.base.row_linear(spec))

    def expert_column_linear(self, experts: range, spec: LinearSpec) -> nn.Module:
        """As ``base``, in the run's precision."""
        self._warn("experts are not multiplied in FP8")
        return self.base.expert_column_linear(experts, spec)

    def _multiplying(self, layer: nn.Module) -> nn.Module:
        if not isinstance(layer, LinearLayer):
            raise InputError(
                f"parallel-layer=fp8 does not stack on a layer of {type(layer).__module__.partition('.')[0]}",
                why="that multiplies by other means",
                fix="choose --plugin parallel-layer=dense+fp8 or tensor+fp8; te has options of its own: te,fp8=current",
            )
        outputs, inputs = layer.get_parameter("weight").shape
        if outputs % MULTIPLE or inputs % MULTIPLE:
            self._warn(f"matrices of {outputs} x {inputs} are not multiplied in FP8: their sides {_NO_MULTIPLE}")
        elif self._rounds:
            scaling = self._options.scaling
            layer.products = Fp8Products(self._options, StepWeight(self._context, layer, FORMATS["e4m3"], scaling))
        return layer

    def _warn(self, what: str) -> None:
        """Log ``what`` once, unless nothing is rounded anyway."""
        if self._rounds and what not in self._named:
            self._named.add(what)
            self._log.warning("parallel-layer=fp8: %s", what)


def check_config(config: Config, options: Options) -> Iterator[str]:
    """Notice if nothing is rounded. Raises InputError where rows are scaled and the results could not be bf16."""
    precision = config.train.precision
    if options.scaling == "rowwise" and precision == "fp16":
        raise InputError(
            "parallel-layer=fp8 with scaling=rowwise does not go with train.precision=fp16",
            why="products of scaled rows return bf16",
            fix="set train.precision=bf16, or scaling=tensorwise",
        )
    if precision == "fp32":
        yield "parallel-layer=fp8 rounds nothing in train.precision=fp32: its products return 16-bit values"


def check_device(device: str, options: Options) -> None:  # noqa: ARG001  # the signature of the contract
    """Raise :class:`PluginError` for a GPU without FP8 products, or for which Triton lacks something.

    On a CPU the products are computed in fp32, slowly.
    """
    place = torch.device(device)
    if place.type != "cuda":
        return
    if (found := torch.cuda.get_device_capability(place)) < _CAPABILITY:
        raise PluginError(
            f"{torch.cuda.get_device_name(place)} has no products in FP8",
            why=f"its compute capability is {found[0]}.{found[1]}, and FP8 begins at 8.9",
            fix="leave fp8 out of parallel-layer",
        )
    if (lack := triton_lack()) is not None:
        raise PluginError(
            "parallel-layer=fp8 has no kernel that rounds to FP8",
            why=lack.why,
            fix=f"{lack.fix}, or leave fp8 out of parallel-layer",
        )


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("parallel-layer", "fp8", options=Options, check_config=check_config, check_device=check_device)


@hookimpl
def megatron_run_create_parallel_layer(context: BuildContext, options: Options, base: ParallelLayers) -> ParallelLayers:
    """Stack FP8 products on ``base``."""
    return Fp8Layers(context, options, base)
