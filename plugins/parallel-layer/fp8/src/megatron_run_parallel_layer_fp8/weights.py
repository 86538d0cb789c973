"""The FP8 copies of a weight, made once a step: parameters change between steps only, and microbatches share them.

The copies lie at fixed addresses, so that graphs read them. They are made before the first segment of a step that reads
the weight, outside of the graphs of segments; a graph of a whole step makes them within.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_run_parallel_layer_fp8.quantized import Quantized, quantize_both, write_both

if TYPE_CHECKING:
    from torch import nn

    from megatron_run_engine.runtime import BuildContext
    from megatron_run_parallel_layer_fp8.quantized import Scaling


class StepWeight:
    """The ``weight`` of ``layer``, as it lies and transposed.

    Copies are those of one step. Outside of training, before the first step and in a step that has not made them yet
    there are none: so none outlives a weight that is loaded, or updated.
    """

    def __init__(self, context: BuildContext, layer: nn.Module, dtype: torch.dtype, scaling: Scaling) -> None:
        self._gradients, self._layer = context.gradients, layer
        self._dtype, self._scaling = dtype, scaling
        self._copies: tuple[Quantized, Quantized] | None = None
        self._made_in = 0
        context.segments.before_reading(layer.get_parameter("weight"), self.make)

    def held(self) -> tuple[Quantized, Quantized] | None:
        """The copies, [o, i] and [i, o], if those of this step are made."""
        fresh = self._layer.training and self._made_in == self._gradients.steps
        return self._copies if fresh else None

    @torch.no_grad()
    def make(self) -> None:
        """Make the copies of this step, unless they are made, or no step is run."""
        step = self._gradients.steps
        if not self._layer.training or self._made_in == step:
            return
        weight = self._layer.get_parameter("weight").detach()
        if self._copies is None:
            self._copies = quantize_both(weight, self._dtype, self._scaling)
        else:
            write_both(self._copies, weight, self._scaling)
        self._made_in = step
