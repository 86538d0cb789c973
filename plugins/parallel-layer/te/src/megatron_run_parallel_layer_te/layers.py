"""The layers of Transformer Engine under the engine's parameter names: linear ones, norms, core attention.

A layer registers the library's module and, before it, the module's parameters under their canonical names: the engine
takes a parameter's name from the first place at which it is registered.

A weight gradient reaches ``main_grad`` in one of three ways. By default a module returns it to autograd, and the
engine's hook adds it. A fused module adds it to ``main_grad`` itself and returns nothing, so its arrival must be
reported. A delayed module keeps its inputs until ``backward_dw()``, which the engine calls at once or in action W.

Legend: s sequence, b micro batch, i inputs, o outputs, h features, n heads, k key-value heads, d head size, t
tensor-parallel size, c bounds of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_run.contracts import AttentionCore, Init, ParameterSpec
from megatron_run_engine.nn import build_device, cumulative_lengths, empty_parameter
from megatron_run_engine.runtime import main_grad
from megatron_run_parallel_layer_te.precision import QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Parameter

    from megatron_run.contracts import AttentionShape, LinearSpec, NormKind
    from megatron_run_engine.nn.parallel import LayerSplit
    from megatron_run_engine.runtime import BuildContext
    from megatron_run_parallel_layer_te.library import Engine
    from megatron_run_parallel_layer_te.precision import Options, Precision


@dataclass(frozen=True)
class Tools:
    """Transformer Engine, the ranks over which its modules are split, and their options and precision."""

    context: BuildContext
    split: LayerSplit
    engine: Engine
    options: Options
    precision: Precision

    @property
    def device(self) -> str:
        """The device of new parameters, as a string, since modules compare it with ``"meta"``."""
        return str(build_device(self.context))

    def splitting(self) -> dict[str, Any]:
        """The arguments that describe the ranks over which a module is split.

        No tracker of random states is passed: modules draw from the device's default generator, which the engine
        positions before each segment, differently on every rank.
        """
        peers = self.split.peers
        return {
            "tp_group": peers.group,
            "tp_size": peers.size,
            "sequence_parallel": self.split.sequence,
            "get_rng_state_tracker": None,
        }

    def product(self) -> dict[str, Any]:
        """The arguments of every matrix product."""
        return {
            **self.splitting(),
            "params_dtype": self.context.dtypes.param,
            "device": self.device,
            "init_method": _leave,
            "fuse_wgrad_accumulation": self.options.fuse_weight_gradients,
            "delay_wgrad_compute": self.options.delay_weight_gradients,
        }


def _leave(weight: Tensor) -> Tensor:
    """Leave the weight uninitialised: the engine fills every parameter by its name."""
    return weight


class ColumnLinear(nn.Module):
    """Computes this rank's slice of the outputs of each of ``parts``; a :class:`Norm` is fused into the product."""

    def __init__(self, tools: Tools, spec: LinearSpec, norm: nn.Module | None = None) -> None:
        super().__init__()
        split, precision = tools.split, tools.precision
        rows = precision.check(split.features(spec.parts), "output features of a rank")
        precision.check(spec.inputs, "input features")
        # In some precisions a delayed product delays the gradient of its bias too; a bias outside is never delayed.
        inside = spec.bias and not tools.options.delay_weight_gradients
        arguments = {"bias": inside, "parallel_mode": "column", **tools.product()}
        module = _column(tools, spec.inputs, spec.features, norm, arguments)
        self.weight: Parameter = module.weight
        outside = empty_parameter(tools.context, rows) if spec.bias and not inside else None
        self.bias: Parameter | None = module.bias if inside else outside
        self.parameter_specs = {
            "weight": ParameterSpec(spec.init, split.rows_of("weight", spec.parts, (spec.inputs,))),
            "bias": ParameterSpec(Init("zeros"), split.rows_of("bias", spec.parts)),
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

    def __init__(self, tools: Tools, spec: LinearSpec) -> None:
        super().__init__()
        split, precision = tools.split, tools.precision
        precision.check(split.part(spec.inputs, "input features"), "input features of a rank")
        precision.check(spec.features, "output features")
        arguments = {"bias": False, "parallel_mode": "row", **tools.product()}
        module = tools.engine.pytorch.Linear(spec.inputs, spec.features, **arguments)
        self.weight: Parameter = module.weight
        self.bias = empty_parameter(tools.context, spec.features) if spec.bias else None
        self.parameter_specs = {
            "weight": ParameterSpec(spec.init, split.columns_of("weight", spec.inputs, spec.features)),
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


class Norm(nn.Module):
    """Layer norm or RMS norm over the last dimension.

    Fused into a product it computes nothing, and only gives the product's norm parameters their names.
    """

    def __init__(self, tools: Tools, kind: NormKind, size: int, eps: float) -> None:
        super().__init__()
        self.normalization, self.eps = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[kind.removesuffix("_1p")], eps
        #: What the library's norms take besides, alone or fused.
        self.form = {"zero_centered_gamma": True} if kind.endswith("_1p") else {}
        make = getattr(tools.engine.pytorch, self.normalization)
        module = make(size, eps=eps, dtype=tools.context.dtypes.param, device=tools.device, **self.form)
        self._hold(module.weight, module.bias if self.normalization == "LayerNorm" else None)
        self.module: nn.Module | None = module
        self.parameter_specs = {
            "weight": tools.split.whole(ParameterSpec(Init("zeros" if self.form else "ones"))),
            "bias": tools.split.whole(ParameterSpec(Init("zeros"))),
        }

    def forward(self, x: Tensor) -> Tensor:
        """[*, h] -> [*, h]."""
        assert self.module is not None, "this norm is computed by the product that it was fused into"
        result: Tensor = self.module(x)
        return result

    def fuse_into(self, product: Any) -> None:
        """Let ``product``, a LayerNormLinear, compute this norm, and adopt its norm parameters."""
        self._hold(product.layer_norm_weight, product.layer_norm_bias if self.bias is not None else None)
        self.module = None

    def _hold(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self.weight, self.bias = weight, bias


class CoreAttention(nn.Module, AttentionCore):
    """softmax(q k^T / sqrt(d)) v on this rank's heads; dropout acts on the probabilities while training."""

    packs = True

    def __init__(self, tools: Tools, shape: AttentionShape, dropout: float) -> None:
        super().__init__()
        self.module = tools.engine.pytorch.DotProductAttention(
            num_attention_heads=shape.heads,
            kv_channels=shape.head_size,
            num_gqa_groups=shape.kv_heads,
            attention_dropout=dropout,
            qkv_format="sbhd",
            attn_mask_type="causal",
            layer_number=shape.layer + 1,
            **tools.splitting(),
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Query [s, b, n/t, d], key and value [s, b, k/t, d] -> [s, b, n/t * d].

        ``mask`` is boolean, broadcastable to [b, 1, s, s], true where a query may attend; None is causal. A query that
        may attend to no key gets zeros; the library alone would give it the mean of all values. ``documents`` [b, c]
        come without a mask.
        """
        if documents is not None:
            return self._within(documents, query, key, value)
        if mask is None:
            result: Tensor = self.module(query, key, value, attn_mask_type="causal")
            return result
        whole = torch.broadcast_to(mask, (query.shape[1], 1, query.shape[0], key.shape[0]))  # [b, 1, s, s]
        # Transformer Engine's masks are the inverse of ours: true where attention is forbidden.
        masked: Tensor = self.module(query, key, value, attention_mask=~whole, attn_mask_type="arbitrary")
        return masked.masked_fill(~whole.any(-1).permute(2, 0, 1), 0.0)  # [b, 1, s] -> [s, b, 1]

    def _within(self, documents: Tensor, *heads: Tensor) -> Tensor:
        """Causal attention within each document: the library's format of tokens without rows (``thd``)."""
        s, b = heads[0].shape[:2]
        flat = [x.transpose(0, 1).flatten(0, 1) for x in heads]  # [b*s, n/t, d]
        lengths = cumulative_lengths(documents, s)
        found: Tensor = self.module(
            *flat,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            max_seqlen_q=s,
            max_seqlen_kv=s,
        )
        return found.reshape(b, s, -1).transpose(0, 1)


class WeightGradient:
    """The gradient of the ``weight`` of one ``module``, a linear layer of Transformer Engine."""

    def __init__(self, tools: Tools, module: Any, weight: Parameter) -> None:
        self._gradients, self._module, self._weight = tools.context.gradients, module, weight
        self._delayed = tools.options.delay_weight_gradients
        self._unseen = self._delayed or tools.options.fuse_weight_gradients

    def watch(self, x: Tensor) -> Tensor:
        """Return the module's input x, marked: the end of the module's backward submits its weight gradient."""
        if not (self._unseen and self._weight.requires_grad and torch.is_grad_enabled()):
            return x
        return after_backward(x, self._hand_over)

    def _hand_over(self) -> None:
        self._gradients.submit((self._weight,), self._finish)

    def _finish(self) -> None:
        """Compute a delayed gradient, first in, first out, and move it out of ``.grad``.

        If a schedule mixes whole and split backwards, W may finish another microbatch's gradient: only the sum counts.
        """
        if self._delayed:
            self._module.backward_dw()
        if self._weight.grad is not None:  # backward_dw sets it outside autograd, so the engine's hook did not run
            main_grad(self._weight).add_(self._weight.grad)
            self._weight.grad = None


def after_backward(x: Tensor, act: Callable[[], None]) -> Tensor:
    """Return x [*] unchanged; the backward calls ``act`` when it reaches x."""
    # The anchor makes autograd run this backward even if x requires no gradient.
    anchor = torch.empty(0, requires_grad=True)
    result: Tensor = _AfterBackward.apply(x, anchor, act)  # type: ignore[no-untyped-call]  # torch's
    return result


class _AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.act()
        return grads[0], None, None
