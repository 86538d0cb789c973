"""Whether the kernels run on a tensor's device."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec
from shutil import which
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_run_engine.nn.device import device_type, is_fake, on_gpu

if TYPE_CHECKING:
    from torch import Tensor

#: Types that the kernels read and write; they compute in fp32.
_TYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


class Lack(NamedTuple):
    """The reason why Triton cannot run kernels on a GPU of this machine, and what to type."""

    why: str
    fix: str


def fuses(x: Tensor) -> bool:
    """Whether the kernels of this package take ``x``, whose last dimension they read in one piece."""
    return x.dtype in _TYPES and x.stride(-1) == 1 and ((is_fake(x) and on_gpu(x)) or has_kernels(device_type(x)))


def triton_runs() -> bool:
    """Whether Triton runs kernels on a GPU of this machine."""
    return triton_lack() is None


def triton_lack() -> Lack | None:
    """Triton's lack for kernels on a GPU: itself, or the C compiler that builds the launcher of each kernel.

    It takes the compiler that ``CC`` names, or else gcc or clang.
    """
    if find_spec("triton") is None:
        return Lack("Triton is not installed", "type: pip install triton")
    named = os.environ.get("CC")
    if any(map(which, ("gcc", "clang") if named is None else (named,))):
        return None
    said = "neither gcc nor clang is" if named is None else f"{named}, which CC names, is not"
    return Lack(f"Triton needs a C compiler, and {said} found", "install gcc, or name another compiler in CC")


@cache
def has_kernels(device: str) -> bool:
    """Whether Triton runs kernels on tensors of that kind of ``device``; says once what it lacks on a GPU."""
    if device == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
    lack = triton_lack() if device == "cuda" else None
    if lack is not None:
        logging.getLogger(__name__).warning("%s: training takes more time and memory without its kernels; %s", *lack)
    return device == "cuda" and lack is None
