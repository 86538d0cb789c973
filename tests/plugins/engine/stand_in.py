"""In the place of ``transformer_engine.pytorch``: its modules' arguments, and their results computed with plain torch.

Arguments and their defaults are those of Transformer Engine 2.9 to 2.20, as far as all of these have them; any other is
a TypeError. What a module does with weight gradients, ``main_grad`` and ``backward_dw`` is what the real
one does. Attention takes its offset in the device's random stream past the dispatcher, whether it drops anything or
not. Each product notes in ``ran_in`` the recipe in whose region it ran, None without.

Legend: s sequence, b micro batch, i inputs, o outputs, n heads, k key-value heads, d head size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F

from megatron_run_engine.runtime.comm import ParallelGroup
from tests.plugins.engine.philox import STREAM
from tests.plugins.engine.recipes import DelayedScaling

Group = dist.ProcessGroup


class _Regions:
    """What ``FP8GlobalStateManager`` knows: the regions that are open, and how often scales were renewed."""

    def __init__(self) -> None:
        self.open: list[Any] = []
        self.groups: list[Any] = []
        self.renewed = 0


REGIONS = _Regions()


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Any = None,
    amax_reduction_group: Group | None = None,
    _graph: bool = False,
) -> Iterator[None]:
    REGIONS.open.append(recipe if enabled else None)
    REGIONS.groups.append(amax_reduction_group)
    try:
        yield
    finally:
        REGIONS.open.pop()
        outermost = enabled and not REGIONS.open and torch.is_grad_enabled()
        REGIONS.renewed += outermost and isinstance(recipe, DelayedScaling)


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    return (True, "") if return_reason else True


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    reason = "Device compute capability 10.0 or higher required for MXFP8 execution."
    return (False, reason) if return_reason else False


is_fp8_block_scaling_available = is_fp8_available


class _Base(nn.Module):
    """What every module knows of the ranks that share it."""

    def __init__(self, tp_group: Group | None, tp_size: int) -> None:
        super().__init__()
        size = tp_size if tp_group is None else dist.get_world_size(tp_group)
        self.peers = ParallelGroup(0 if tp_group is None else dist.get_rank(tp_group), size, tp_group)


class _Product(_Base):
    """y = x A^T + b, split by columns or rows, with every way in which a weight gradient may go."""

    def __init__(self, in_features: int, out_features: int, options: dict[str, Any]) -> None:
        super().__init__(options["tp_group"], options["tp_size"])
        unused = {name for name, value in options.items() if name.startswith("ub_") and value}
        assert not unused, f"not stood in for: {unused}"
        assert options["parallel_mode"] in (None, "column", "row")
        assert options["parameters_split"] is None
        assert isinstance(options["device"], str), 'the real module compares it with "meta"'
        self.mode, self.sequence = options["parallel_mode"], options["sequence_parallel"] and self.peers.size > 1
        self.fused, self.delayed = options["fuse_wgrad_accumulation"], options["delay_wgrad_compute"]
        self.waiting: deque[Callable[[], tuple[Tensor, Tensor]]] = deque()
        self.ran_in: list[Any] = []
        self._fp8_workspaces: dict[str, Tensor] = {}
        self.quantised = 0
        outputs, inputs = self._part("column", out_features), self._part("row", in_features)
        place = {"device": options["device"], "dtype": options["params_dtype"]}
        self.weight = Parameter(torch.empty(outputs, inputs, **place))
        self.bias = Parameter(torch.empty(outputs, **place)) if options["bias"] else torch.empty(0, **place)
        if options["device"] != "meta":
            (options["init_method"] or nn.init.normal_)(self.weight)
        self.options = options

    def _part(self, mode: str, size: int) -> int:
        assert self.mode != mode or size % self.peers.size == 0
        return size // self.peers.size if self.mode == mode else size

    def multiply(self, x: Tensor, is_first_microbatch: bool | None) -> Tensor:
        assert not is_first_microbatch, "the real module would overwrite main_grad"
        recipe = REGIONS.open[-1] if REGIONS.open else None
        weight = self.quantise(keep=is_first_microbatch is not None) if recipe else self.weight
        self.ran_in.append(recipe)
        for tensor in (x, self.weight) if recipe else ():
            assert tensor.shape[:-1].numel() % 8 == 0, f"FP8 refuses {list(tensor.shape)}"
            assert tensor.shape[-1] % 16 == 0, f"FP8 refuses {list(tensor.shape)}"
        bias = self.bias if isinstance(self.bias, Parameter) else None
        assert bias is None or self.mode != "row"
        result: Tensor = _Multiply.apply(x, self.weight, weight, bias, self)  # type: ignore[no-untyped-call]  # torch's
        return result

    def quantise(self, *, keep: bool) -> Tensor:
        """The weight in "FP8", kept if it is to be; one that is kept is used again, however the weight has changed."""
        if keep and "weight" in self._fp8_workspaces:
            return self._fp8_workspaces["weight"]
        self.quantised += 1
        copy = self.weight.detach().clone()
        if keep:
            self._fp8_workspaces["weight"] = copy
        return copy

    def backward_dw(self) -> None:
        if self.delayed:
            gradient, bias_gradient = self.waiting.popleft()()
            if not self.fused:
                self.weight.grad = gradient
            if isinstance(self.bias, Parameter) and self.bias.grad is None:
                self.bias.grad = bias_gradient

    def finish(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor | None, Tensor | None]:
        """What the backward returns for weight and bias; in the precision of the weights both are delayed."""
        gradients: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.delayed:
            self.waiting.append(compute)
        else:
            gradient, bias_gradient = compute()
            gradients = (None if self.fused else gradient, bias_gradient)
        if self.fused and hasattr(self.weight, "grad_added_to_main_grad"):
            self.weight.grad_added_to_main_grad = True
            dummy = torch.full_like(self.weight, torch.nan)  # in the real module whatever memory held
            return dummy, gradients[1]
        return gradients


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Parameter, weight: Tensor, bias: Parameter | None, module: _Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module, ctx.bias = module, bias
        peers, column = module.peers, module.mode == "column"
        y = F.linear(peers.gather(x) if column and module.sequence else x, weight, bias)
        if module.mode != "row":
            return y
        return peers.scatter_sum(y) if module.sequence else peers.sum_(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor | None, None]:
        (x, weight), module, peers = ctx.saved_tensors, ctx.module, ctx.module.peers
        grad = grads[0].contiguous()
        if module.mode == "row" and module.sequence:
            grad = peers.gather(grad)
        dx = grad @ weight
        if module.mode == "column":
            dx = peers.scatter_sum(dx) if module.sequence else peers.sum_(dx)
            x = peers.gather(x) if module.sequence else x

        def compute() -> tuple[Tensor, Tensor]:
            rows = grad.flatten(0, -2)  # [s*b, o]
            gradient = rows.t() @ x.flatten(0, -2)
            return module.weight.main_grad.add_(gradient) if module.fused else gradient, rows.sum(0)

        dw, db = module.finish(compute)
        return dx, dw, None, None if ctx.bias is None else db, None


class Linear(_Product):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Group | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: dict[str, int] | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, {k: v for k, v in locals().items() if k not in _NOT_OPTIONS})

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Tensor:
        return self.multiply(inp, is_first_microbatch)


class LayerNormLinear(_Product):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Group | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: dict[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, {k: v for k, v in locals().items() if k not in _NOT_OPTIONS})
        assert normalization in ("LayerNorm", "RMSNorm")
        assert parallel_mode != "row"
        layer_norm = normalization == "LayerNorm"
        start = torch.full((in_features,), 1.0 - zero_centered_gamma, device=device, dtype=params_dtype)
        self.layer_norm_weight = Parameter(start)
        self.layer_norm_bias = Parameter(torch.zeros_like(self.layer_norm_weight)) if layer_norm else None

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Tensor:
        weight = self.layer_norm_weight + self.options["zero_centered_gamma"]
        y = _normalise(inp, weight, self.layer_norm_bias, self.options["eps"])
        return self.multiply(y, is_first_microbatch)


#: What ``locals()`` holds in a constructor besides its options.
_NOT_OPTIONS = {"self", "__class__", "in_features", "out_features"}


class _Norm(nn.Module):
    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int = 0,
    ) -> None:
        super().__init__()
        assert hidden_size is None, "deprecated"
        assert params_dtype is None, "deprecated"
        assert normalized_shape is not None
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        start = torch.full((normalized_shape,), 1.0 - zero_centered_gamma, device=device or "cuda", dtype=dtype)
        self.weight = Parameter(start)
        self.bias: Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        return _normalise(x, self.weight + self.zero_centered_gamma, getattr(self, "bias", None), self.eps)


class RMSNorm(_Norm):
    """The real one has no ``bias`` either, not even None."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        del self.bias


class LayerNorm(_Norm):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.bias = Parameter(torch.zeros_like(self.weight))


def _normalise(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class DotProductAttention(_Base):
    def __init__(
        self,
        *,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Group | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Group | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        self.options = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        options = self.options
        super().__init__(tp_group, tp_size)
        self.options = options

    def forward(  # noqa: PLR0917  # the library's
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
    ) -> Tensor:
        """Query [s, b, n/t, d], key and value [s, b, k/t, d] -> [s, b, n/t * d]; a true value hides.

        In the format thd they are [tokens, n/t, d], in sequences that begin at ``cu_seqlens_q``.
        """
        if qkv_format == "thd":
            assert attn_mask_type == "padding_causal"
            assert cu_seqlens_q is not None
            assert cu_seqlens_q.dtype == torch.int32
            assert cu_seqlens_kv is not None
            assert torch.equal(cu_seqlens_q, cu_seqlens_kv)
            sizes = cu_seqlens_q.diff().tolist()
            assert max_seqlen_q == max_seqlen_kv
            assert max(sizes) <= (max_seqlen_q or 0)
            queries, keys, values = (x[:, None].split(sizes) for x in (query_layer, key_layer, value_layer))
            parts = [part for part in zip(queries, keys, values, strict=True) if len(part[0])]
            return torch.cat([self.forward(q, k, v, attn_mask_type="causal")[:, 0] for q, k, v in parts])
        STREAM.advance()
        kind, size = attn_mask_type or self.options["attn_mask_type"], self.peers.size
        assert query_layer.shape[-2:] == (self.options["num_attention_heads"] // size, self.options["kv_channels"])
        assert key_layer.shape[-2] == (self.options["num_gqa_groups"] or self.options["num_attention_heads"]) // size
        assert (attention_mask is not None) == (kind == "arbitrary"), kind
        if attention_mask is not None:  # as its kernels take it: [b, 1, s, s] and nothing that broadcasts
            length = query_layer.shape[0]
            assert attention_mask.shape == (query_layer.shape[1], 1, length, length)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5  # [b, n, s, s]
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1) if attention_mask is None else attention_mask
        seen = scores.masked_fill(hidden, -10000.0).softmax(-1)  # finite: a row that is hidden whole becomes a mean
        seen = F.dropout(seen, self.options["attention_dropout"], self.training)
        return (seen @ value).permute(2, 0, 1, 3).flatten(2)
