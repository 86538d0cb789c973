"""Replaces ``transformer_engine.pytorch`` on the meta device: modules with its parameters that compute nothing.

They let machines without GPU and library plan a run.

Legend: i inputs, o outputs, t tensor-parallel size.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import Parameter


class Linear(nn.Module):
    """``weight`` [o/t, i] and ``bias`` [o/t] split by columns, ``weight`` [o, i/t] by rows."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        parallel_mode: Literal["column", "row"],
        tp_size: int,
        params_dtype: torch.dtype,
        device: str,
        **_: object,
    ) -> None:
        super().__init__()
        column = parallel_mode == "column"
        rows, columns = (outputs // tp_size, inputs) if column else (outputs, inputs // tp_size)
        self.weight = _parameter(rows, columns, dtype=params_dtype, device=device)
        self.bias = _parameter(rows, dtype=params_dtype, device=device) if bias else None


class LayerNormLinear(Linear):
    """A linear layer with the norm before it: ``layer_norm_weight`` and ``layer_norm_bias``, both [i]."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        normalization: Literal["LayerNorm", "RMSNorm"],
        params_dtype: torch.dtype,
        device: str,
        **others: Any,
    ) -> None:
        super().__init__(inputs, outputs, params_dtype=params_dtype, device=device, **others)
        self.layer_norm_weight = _parameter(inputs, dtype=params_dtype, device=device)
        biased = normalization == "LayerNorm"
        self.layer_norm_bias = _parameter(inputs, dtype=params_dtype, device=device) if biased else None


class RMSNorm(nn.Module):
    """``weight`` over the last dimension."""

    def __init__(self, size: int, *, dtype: torch.dtype, device: str, **_: object) -> None:
        super().__init__()
        self.weight = _parameter(size, dtype=dtype, device=device)


class LayerNorm(RMSNorm):
    """``weight`` and ``bias`` over the last dimension."""

    def __init__(self, size: int, *, dtype: torch.dtype, device: str, **others: object) -> None:
        super().__init__(size, dtype=dtype, device=device, **others)
        self.bias = _parameter(size, dtype=dtype, device=device)


class DotProductAttention(nn.Module):
    """No parameters."""

    def __init__(self, **_: object) -> None:
        super().__init__()


def _parameter(*shape: int, dtype: torch.dtype, device: str) -> Parameter:
    return Parameter(torch.empty(shape, dtype=dtype, device=device))
