"""Layer norm (Ba, Kiros and Hinton 2016) and root-mean-square norm (Zhang and Sennrich 2019), over the last dimension.

On a GPU one kernel computes all gradients of a norm, and those of weight and bias are submitted to the accumulator.

Legend: h features; s sequence, b micro batch, n heads, k key-value heads, d head size, t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import Init, ParameterSpec, Part
from megatron_run.errors import InputError
from megatron_run_engine.nn.fused import WIDEST_NORM, fuses, norm_gradients
from megatron_run_engine.nn.linear import add_rows
from megatron_run_engine.nn.parameter import empty_parameter
from megatron_run_engine.runtime.gradients import has_main_grad, main_grad

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Parameter

    from megatron_run.contracts import NormKind, ParallelLayers
    from megatron_run_engine.nn.spec import TransformerSpec
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_engine.runtime.gradients import GradientAccumulator


class LayerNorm(nn.Module):
    """``(x - mean) / sqrt(variance + eps) * weight + bias``: [*, h] -> [*, h]; with ``plus_one`` times 1 + weight."""

    def __init__(self, context: BuildContext, size: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__()
        self.eps, self.plus_one, self.gradients = eps, plus_one, context.gradients
        self.weight = empty_parameter(context, size)
        self.bias = empty_parameter(context, size)
        self.parameter_specs = {"weight": _scale(plus_one), "bias": ParameterSpec(Init("zeros"))}

    def forward(self, x: Tensor) -> Tensor:
        """[*, h] -> [*, h]."""
        if not self.plus_one:
            if _fuses(x, self.weight):
                return _norm(x, self.weight, self.bias, self.eps, self.gradients)
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        # In fp32: in 16 bits, 1 + weight would lose the small weights that this form is for.
        wide, weight, bias = (_widened(each) for each in (x, self.weight, self.bias))
        return F.layer_norm(wide, weight.shape, 1 + weight, bias, self.eps).to(x.dtype)


class RmsNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``: [*, h] -> [*, h]; with ``plus_one`` times 1 + weight."""

    def __init__(self, context: BuildContext, size: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__()
        self.eps, self.plus_one, self.gradients = eps, plus_one, context.gradients
        self.weight = empty_parameter(context, size)
        self.parameter_specs = {"weight": _scale(plus_one)}

    def forward(self, x: Tensor) -> Tensor:
        """[*, h] -> [*, h]."""
        if not self.plus_one:
            if _fuses(x, self.weight):
                return _norm(x, self.weight, None, self.eps, self.gradients)
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide, weight = _widened(x), _widened(self.weight)
        return F.rms_norm(wide, weight.shape, 1 + weight, self.eps).to(x.dtype)


class _Norm(torch.autograd.Function):
    """PyTorch's forward, and the backward of :mod:`.fused`; without a bias it is the root-mean-square norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, bias: Parameter | None, eps: float, gradients: GradientAccumulator
    ) -> Tensor:
        result: Tensor
        mean: Tensor | None = None
        if bias is None:
            result, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        else:
            result, mean, scale = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, scale)
        ctx.weight, ctx.bias, ctx.gradients = weight, bias, gradients  # the parameters themselves: see linear.py
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale = ctx.saved_tensors
        rows, slopes = (each.contiguous().flatten(0, -2) for each in (x, grads[0]))
        result, *sums = norm_gradients(slopes, rows, ctx.weight, mean, scale)
        learnt = {p: of_p for p, of_p in zip((ctx.weight, ctx.bias), sums, strict=True) if _learns(p)}

        def compute() -> None:
            for parameter, of_programs in learnt.items():
                add_rows(main_grad(parameter), of_programs)

        if learnt:
            ctx.gradients.submit(tuple(learnt), compute)
        return result.view_as(x), *(None,) * 4


def _norm(*arguments: Any) -> Tensor:
    """:class:`_Norm` of its ``arguments``."""
    result: Tensor = _Norm.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's
    return result


def _fuses(x: Tensor, weight: Parameter) -> bool:
    """Whether the kernel takes a norm of ``x``, and there is a place for the gradient of its ``weight``."""
    fits = x.dtype == weight.dtype and x.dim() > 1 and x.is_contiguous() and weight.numel() <= WIDEST_NORM
    return torch.is_grad_enabled() and fuses(x) and fits and _learns(weight)


def _learns(parameter: Parameter | None) -> bool:
    return parameter is not None and parameter.requires_grad and has_main_grad(parameter)


def make_norm(context: BuildContext, kind: NormKind, size: int, eps: float) -> LayerNorm | RmsNorm:
    """A norm of ``kind`` over ``size`` features."""
    made = LayerNorm if kind.startswith("layernorm") else RmsNorm
    return made(context, size, eps, plus_one=kind.endswith("_1p"))


def norm_of(layers: ParallelLayers, spec: TransformerSpec) -> nn.Module:
    """A norm of the residual stream, made by ``layers``.

    Raises :class:`InputError` where the factory gives another kind than it was asked for: one that does not know the
    kinds with 1 + weight would compute the plain ones.
    """
    norm = layers.norm(spec.norm, spec.hidden, spec.norm_eps)
    known: ParameterSpec | None = getattr(norm, "parameter_specs", {}).get("weight")
    if spec.norm.endswith("_1p") and (known is None or known.init.kind != "zeros"):
        raise InputError(
            f"these parallel layers have no model.norm.kind={spec.norm}", fix="choose another parallel-layer"
        )
    return norm


class FullQkNorms(nn.Module):
    """Root-mean-square norms over all query features and over all key features, of which a rank holds some heads.

    OLMo et al. 2024, "2 OLMo 2 Furious", section 2. Ranks sum one number per token for each of the two.
    """

    def __init__(self, context: BuildContext, layers: ParallelLayers, spec: TransformerSpec) -> None:
        super().__init__()
        sizes = {"query": spec.heads * spec.head_size, "key": spec.kv_heads * spec.head_size}
        split, rank = context.topology.sizes.tensor, context.topology.tensor_rank
        self.features, self.eps, self.plus_one = list(sizes.values()), spec.norm_eps, spec.norm.endswith("_1p")
        self.query, self.key = (empty_parameter(context, size // split) for size in sizes.values())
        self.parameter_specs = {
            name: replace(
                _scale(self.plus_one),
                parts=(Part(f"{name}.weight", (size,), range(size // split), start=rank * (size // split)),),
            )
            for name, size in sizes.items()
        }
        self._total: Callable[[Tensor], Tensor] = lambda x: layers.enter_region(layers.leave_region(x))

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Query [s, b, n/t, d] and key [s, b, k/t, d] -> the same, each normalised over the heads of all ranks."""
        wide = [_widened(each.flatten(2)) for each in (query, key)]  # [s, b, n/t * d]
        squares = [each.square().sum(-1) / size for each, size in zip(wide, self.features, strict=True)]
        scales = (self._total(torch.stack(squares, dim=-1)) + self.eps).rsqrt().split(1, dim=-1)  # each [s, b, 1]
        weights = [_widened(each) + self.plus_one for each in (self.query, self.key)]
        query, key = (
            (each * scale * weight).to(like.dtype).view_as(like)
            for each, scale, weight, like in zip(wide, scales, weights, (query, key), strict=True)
        )
        return query, key


class HeadQkNorms(nn.Module):
    """A norm over the features of each query head, and one over those of each key head."""

    def __init__(self, context: BuildContext, spec: TransformerSpec) -> None:
        super().__init__()
        self.query, self.key = (make_norm(context, spec.norm, spec.head_size, spec.norm_eps) for _ in range(2))
        if context.topology.sizes.tensor > 1:  # a rank sees some heads: its gradients are terms of a sum
            for norm in (self.query, self.key):
                norm.parameter_specs = {
                    name: replace(own, partial_over="tensor") for name, own in norm.parameter_specs.items()
                }

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Query [s, b, n/t, d] and key [s, b, k/t, d] -> the same, each head normalised."""
        return self.query(query), self.key(key)


def qk_norms(context: BuildContext, layers: ParallelLayers, spec: TransformerSpec) -> nn.Module | None:
    """The norms of queries and keys, if ``spec`` has any."""
    if spec.qk_norm == "none":
        return None
    return HeadQkNorms(context, spec) if spec.qk_norm == "head" else FullQkNorms(context, layers, spec)


def _scale(plus_one: bool) -> ParameterSpec:
    return ParameterSpec(Init("zeros" if plus_one else "ones"))


def _widened(x: Tensor) -> Tensor:
    """X in fp32, or float64 if it has that type."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
