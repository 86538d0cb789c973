"""The peak speed of the device. MFU (model FLOP/s utilisation) is the fraction of it that a step reaches.

MFU as in PaLM (Chowdhery et al. 2022, appendix B): the operations that the model's formula needs, over those that the
device could have done in the same time. Recomputed operations do not count.
"""

from __future__ import annotations

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


def device_peak(options: RunSection, precision: str, device: torch.device) -> DevicePeak | None:
    """The peak of ``device`` with factors of ``precision``: ``run.peak_tflops``, else that of the table.

    None for a device that the table does not have. No CPU is in it: what one reaches depends on its clock, its cores
    and what else they do, so a peak measured at a run's start would differ from run to run.
    """
    if options.peak_tflops is not None:
        return DevicePeak(options.peak_tflops, "run.peak_tflops")
    known = known_peak(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None
    return None if known is None else DevicePeak(known, "data sheet")


def known_peak(name: str, precision: str) -> float | None:
    """TFLOP/s of the device of that ``name``, None where the table has no such device or it is a part (MIG) of one."""
    fitting = [known for known in TABLE if f"{name} ".startswith((f"{known} ", f"{known}-"))]
    if not fitting or " MIG " in name:
        return None
    return TABLE[max(fitting, key=len)][1 if precision == "fp32" else 0]
