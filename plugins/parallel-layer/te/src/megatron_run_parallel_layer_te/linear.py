"""Linear layers of Transformer Engine under the engine's parameter names.

A layer registers the library's module and, before it, the module's parameters under their canonical names: the engine
takes a parameter's name from the first place at which it is registered.

Legend: s sequence, b micro batch, i inputs, o outputs, t tensor-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron_run.contracts import Init, ParameterSpec
from megatron_run_engine.nn import empty_parameter
from megatron_run_parallel_layer_te.norm import Norm
from megatron_run_parallel_layer_te.precision import QuantizedWeight
from megatron_run_parallel_layer_te.weight_gradients import WeightGradient

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import LinearPart
    from megatron_run_parallel_layer_te.tools import Tools


class ColumnLinear(nn.Module):
    """Computes this rank's slice of the outputs of each of ``parts``; a :class:`Norm` is fused into the product."""

    def __init__(
        self,
        tools: Tools,
        inputs: int,
        parts: tuple[LinearPart, ...],
        *,
        bias: bool,
        init: Init,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        split, precision = tools.split, tools.precision
        rows = precision.check(split.features(parts), "output features of a rank")
        precision.check(inputs, "input features")
        # In some precisions a delayed product delays the gradient of its bias too; a bias outside is never delayed.
        inside = bias and not tools.options.delay_weight_gradients
        arguments = {"bias": inside, "parallel_mode": "column", **tools.product()}
        module = _column(tools, inputs, sum(part.features for part in parts), norm, arguments)
        self.weight: Parameter = module.weight
        self.bias: Parameter | None = module.bias if inside else empty_parameter(tools.context, rows) if bias else None
        self.parameter_specs = {
            "weight": ParameterSpec(init, split.rows_of("weight", parts, (inputs,))),
            "bias": ParameterSpec(Init("zeros"), split.rows_of("bias", parts)),
        }
        self.norm = norm
        self._norm_inside, self._bias_inside = isinstance(norm, Norm), inside
        self.module = module
        self._precision, self._weight_gradient = precision, WeightGradient(tools, module, self.weight)
        self._quantized = QuantizedWeight(tools.context.gradients, module)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i] or [s/t, b, i] -> [s, b, o/t]."""
        if self.norm is not None and not self._norm_inside:
            x = self.norm(x)
        with self._precision.region(x):
            first = self._precision.is_first_microbatch(self._quantized, training=self.training)
            y: Tensor = self.module(self._weight_gradient.watch(x), is_first_microbatch=first)
        return y if self.bias is None or self._bias_inside else y + self.bias


class RowLinear(nn.Module):
    """Takes this rank's slice of the inputs; products are summed over the ranks, then the bias is added once."""

    def __init__(self, tools: Tools, inputs: int, outputs: int, *, bias: bool, init: Init) -> None:
        super().__init__()
        split, precision = tools.split, tools.precision
        precision.check(split.part(inputs, "input features"), "input features of a rank")
        precision.check(outputs, "output features")
        module = tools.engine.pytorch.Linear(inputs, outputs, bias=False, parallel_mode="row", **tools.product())
        self.weight: Parameter = module.weight
        self.bias = empty_parameter(tools.context, outputs) if bias else None
        self.parameter_specs = {
            "weight": ParameterSpec(init, split.columns_of("weight", inputs, outputs)),
            "bias": split.whole(ParameterSpec(Init("zeros"))),
        }
        self.module = module
        self._precision, self._weight_gradient = precision, WeightGradient(tools, module, self.weight)
        self._quantized = QuantizedWeight(tools.context.gradients, module)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i/t] -> [s, b, o] or [s/t, b, o]."""
        with self._precision.region(x):
            first = self._precision.is_first_microbatch(self._quantized, training=self.training)
            y: Tensor = self.module(self._weight_gradient.watch(x), is_first_microbatch=first)
        return y if self.bias is None else y + self.bias


def _column(tools: Tools, inputs: int, outputs: int, norm: nn.Module | None, arguments: dict[str, Any]) -> Any:
    """The product, with ``norm`` fused if it is a :class:`Norm`; other norms are applied before it."""
    library = tools.engine.pytorch
    if not isinstance(norm, Norm):
        return library.Linear(inputs, outputs, **arguments)
    arguments |= {"eps": norm.eps, "normalization": norm.normalization, **norm.form}
    module = library.LayerNormLinear(inputs, outputs, **arguments)
    norm.fuse_into(module)
    return module
