"""megatron-core on a CPU: its code runs as it is; only the device that it names, which is always a GPU, is another."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

NAME = "megatron-core"


def installed() -> bool:
    """Whether megatron-core can be imported."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


class TorchOnCpu:
    """The module ``torch`` for code that names GPUs: the same, with the CPU in their place."""

    cuda = SimpleNamespace(current_device=lambda: torch.device("cpu"), synchronize=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, data: Any, *, device: object = None, **rest: Any) -> Tensor:
        """As ``torch.tensor``, wherever it was meant to be."""
        return torch.tensor(data, **rest)

    def zeros(self, *size: Any, device: object = None, **rest: Any) -> Tensor:
        """As ``torch.zeros``, wherever it was meant to be."""
        return torch.zeros(*size, **rest)

    def ones(self, *size: Any, device: object = None, **rest: Any) -> Tensor:
        """As ``torch.ones``, wherever it was meant to be."""
        return torch.ones(*size, **rest)
