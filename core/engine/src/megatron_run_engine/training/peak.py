"""The peak speed of the device. MFU (model FLOP/s utilisation) is the fraction of it that a step reaches.

MFU as in PaLM (Chowdhery et al. 2022, appendix B): the operations that the model's formula needs, over those that the
device could have done in the same time. Recomputed operations do not count.
"""

from __future__ import annotations

import time
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from megatron_run.contracts import DevicePeak

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_run.contracts.schema import RunSection

#: By the start of the name that ``torch.cuda.get_device_name`` gives: dense TFLOP/s with 16-bit factors (bf16 and fp16
#: alike, summed in fp32) and in fp32 without TF32, which torch leaves off by default. Of two names that fit the longer
#: counts. From the vendors' data sheets, where a figure "with sparsity" is twice the dense one.
TABLE: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "NVIDIA A100": (312.0, 19.5),  # NVIDIA A100 data sheet
        "NVIDIA A30": (165.0, 10.3),  # NVIDIA A30 data sheet
        "NVIDIA A40": (149.7, 37.4),  # NVIDIA A40 data sheet
        "NVIDIA L4": (121.0, 30.3),  # NVIDIA L4 data sheet
        "NVIDIA L40": (181.0, 90.5),  # NVIDIA L40 data sheet
        "NVIDIA L40S": (362.0, 91.6),  # NVIDIA L40S data sheet
        "NVIDIA H100": (989.0, 67.0),  # NVIDIA H100 data sheet, SXM
        "NVIDIA H100 PCIe": (756.0, 51.0),  # NVIDIA H100 architecture paper
        "NVIDIA H100 NVL": (835.0, 60.0),  # NVIDIA H100 data sheet
        "NVIDIA H200": (989.0, 67.0),  # NVIDIA H200 data sheet, SXM
        "NVIDIA H200 NVL": (835.0, 60.0),  # NVIDIA H200 data sheet
        "NVIDIA GH200": (989.0, 67.0),  # NVIDIA GH200 data sheet
        "NVIDIA B200": (2250.0, 75.0),  # NVIDIA HGX data sheet: 18 PFLOP/s and 600 TFLOP/s of eight
        "NVIDIA GB200": (2500.0, 80.0),  # NVIDIA GB200 NVL72 data sheet: 180 PFLOP/s and 5,760 TFLOP/s of 72
        "AMD Instinct MI300X": (1307.4, 163.4),  # AMD MI300X data sheet
    }
)

_DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})

#: Seconds that one multiplication of the measurement may take; all of them take some four times as long.
_AT_MOST = 0.005


def device_peak(options: RunSection, precision: str, device: torch.device) -> DevicePeak | None:
    """The peak of ``device`` with factors of ``precision``: ``run.peak_tflops``, else known or measured.

    None for a GPU that the table does not have. The CPU's is what the threads of this process reach together.
    """
    if options.peak_tflops is not None:
        return DevicePeak(options.peak_tflops, "run.peak_tflops")
    if device.type == "cpu":
        return DevicePeak(_measured(_DTYPES[precision], torch.get_num_threads()), "measured")
    known = known_peak(torch.cuda.get_device_name(device), precision)
    return None if known is None else DevicePeak(known, "data sheet")


def known_peak(name: str, precision: str) -> float | None:
    """TFLOP/s of the device of that ``name``, None where the table has no such device or it is a part (MIG) of one."""
    fitting = [known for known in TABLE if f"{name} ".startswith((f"{known} ", f"{known}-"))]
    if not fitting or " MIG " in name:
        return None
    return TABLE[max(fitting, key=len)][1 if precision == "fp32" else 0]


@cache
def _measured(dtype: torch.dtype, threads: int) -> float:  # noqa: ARG001  # the cache tells by them
    """TFLOP/s of square matrix products in ``dtype``, the best of a few sizes, with the ``threads`` that torch has.

    Each size is twice the one before, as long as a product is expected to take less than ``_AT_MOST``: large enough for
    the caches to matter, small enough that a start does not feel it. No random number is drawn.
    """
    size, best, expected = 128, 0.0, 0.0
    while size <= 2048 and expected < _AT_MOST:  # more would show in the process's peak memory
        factor = torch.ones(size, size, dtype=dtype)
        product = torch.empty_like(factor)
        torch.mm(factor, factor, out=product)  # the first of a size chooses its kernel
        seconds = min(_timed(factor, product) for _ in range(3))
        best = max(best, 2 * size**3 / seconds / 1e12)
        expected, size = 8 * seconds, 2 * size
    return best


def _timed(factor: torch.Tensor, product: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(factor, factor, out=product)
    return time.perf_counter() - start
