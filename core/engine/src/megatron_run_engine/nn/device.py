"""Which kind of device a tensor is on: every layer asks here, so that a plan for a GPU takes a GPU's ways.

A step's memory is counted on fake tensors. Those that stand for a GPU's are fake tensors of the CPU: a torch built
for CPUs has none of CUDA with gradients; their mode says what they stand for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


class PlannedMode(FakeTensorMode):
    """Makes fake tensors of the CPU that stand for those of a ``gpu``, if that is planned for."""

    def __init__(self, *, gpu: bool) -> None:
        super().__init__()
        self.gpu = gpu


def is_fake(x: Tensor) -> bool:
    """Whether ``x`` has no values: its memory is counted, or a graph is made of it."""
    return hasattr(x, "fake_mode")


def stands_for_gpu(x: Tensor) -> bool:
    """Whether ``x`` is fake and stands for a tensor of a GPU that need not be in this machine."""
    return bool(getattr(getattr(x, "fake_mode", None), "gpu", False))


def device_type(x: Tensor) -> str:
    """The kind of device that ``x`` is on or stands for, as ``torch.device.type`` names it."""
    return "cuda" if stands_for_gpu(x) else x.device.type


def on_cpu(x: Tensor) -> bool:
    """Whether ``x`` is computed by a CPU."""
    return device_type(x) == "cpu"


def on_gpu(x: Tensor) -> bool:
    """Whether ``x`` is computed by a GPU."""
    return device_type(x) == "cuda"


def widens_by_hardware(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether a GPU adds products of ``narrow`` operands to a ``wide`` total: tensor cores sum 16 bits in fp32."""
    return wide == torch.float32 and narrow in (torch.bfloat16, torch.float16)
