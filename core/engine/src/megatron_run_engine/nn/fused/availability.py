"""Whether the kernels run on a tensor's device."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from megatron_run_engine.nn.device import device_type, is_fake, on_gpu

if TYPE_CHECKING:
    from torch import Tensor

#: Types that the kernels read and write; they compute in fp32.
_TYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


def fuses(x: Tensor) -> bool:
    """Whether the kernels of this package take ``x``, whose last dimension they read in one piece."""
    return x.dtype in _TYPES and x.stride(-1) == 1 and ((is_fake(x) and on_gpu(x)) or has_kernels(device_type(x)))


@cache
def has_kernels(device: str) -> bool:
    """Whether Triton runs kernels on tensors of that kind of ``device``; says once where it is missing on a GPU."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device != "cuda" and not (device == "cpu" and interpreted):
        return False
    found = find_spec("triton") is not None
    if not found:
        logging.getLogger(__name__).warning("Triton is not installed: losses and biases take more time and memory")
    return found
