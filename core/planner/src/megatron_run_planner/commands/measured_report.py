"""The output of ``plan check`` and ``plan calibrate``: predictions beside measured steps, and a measured machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_run_planner.commands.plan_report import model_record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from megatron_run_planner.accuracy import Accuracy, Compared
    from megatron_run_planner.accuracy.calibrate import Survey
    from megatron_run_planner.devices import Device

_WORST = 10
_GIB = 2**30


def accuracy_text(found: Accuracy, device: Device, *, every: bool) -> str:
    """The summary, and the rows with the largest errors, or with ``every`` all in the table's order."""
    worst = sorted(found.rows, key=lambda each: -abs(each.error))[:_WORST]
    summary = [
        f"{len(found.rows)} rows on {device.name}",
        f"  mean error        {found.mean_error:.2%}",
        f"  Kendall's tau     {found.kendall:.3f} within each model and machine size",
        f"  regret of choice  {found.regret_mean:.2%} on average, {found.regret_max:.2%} at most",
        f"                    over {len(found.regrets)} tasks (same model, devices and global batch)",
    ]
    title = "every row" if every else f"the {len(worst)} largest errors"
    return "\n".join([*summary, "", title, *_lines(found.rows if every else worst)])


def _lines(rows: Iterable[Compared]) -> list[str]:
    head = "layers  hidden  GPUs  tensor  pipeline  data  micro  batch  recompute   measured  predicted    error"
    lines = [head]
    for row, predicted in rows:
        model, split = row.model, row.split
        lines.append(
            f"{len(model.layers):6}  {model.hidden:6}  {split.ranks:4}  {split.tensor:6}  {split.pipeline:8}  "
            f"{split.data:4}  {split.micro_batch:5}  {split.global_batch:5}  {split.recompute:9}  {row.seconds:8.3f}s  "
            f"{predicted:8.3f}s  {predicted / row.seconds - 1:+7.1%}"
        )
    return lines


def accuracy_record(found: Accuracy, device: Device) -> dict[str, Any]:
    """The same as data; errors and regrets are fractions, times seconds."""
    return {
        "device": device.name,
        "count": len(found.rows),
        "mean_error": found.mean_error,
        "kendall": found.kendall,
        "regret_mean": found.regret_mean,
        "regret_max": found.regret_max,
        "tasks": len(found.regrets),
        "rows": [
            {
                "model": model_record(row.model),
                "split": asdict(row.split),
                "measured": row.seconds,
                "predicted": predicted,
                "error": predicted / row.seconds - 1,
            }
            for row, predicted in found.rows
        ],
    }


def gpu_lines(device: Device) -> list[str]:
    """The rates of a measured GPU, and the time of its host."""
    peak, memory, host = device.peak / 1e12, device.bandwidth / 1e12, device.host
    return [
        device.name,
        f"  products   {peak * device.products.efficiency:,.0f} TFLOP/s in bf16, of {peak:,.0f}",
        f"  attention  {peak * device.products.attention:,.0f} TFLOP/s, all scores counted",
        f"  memory     {memory * device.sweeps.efficiency:,.2f} TB/s, of {memory:,.2f}",
        f"  a layer    {host.layer * 1e3:.2f} ms for calls alone; a small kernel {host.kernel * 1e6:.1f} us",
    ]


def device_lines(device: Device, survey: Survey) -> list[str]:
    """The rates of a measured device, and what its ranks cost each other."""
    half = max(2 * rows * columns * depth / seconds for rows, columns, depth, seconds in survey.half_products)
    lines = [
        f"{device.name}",
        f"  products   {device.peak * device.products.efficiency / 1e9:,.0f} GFLOP/s, in bf16 {half / 1e9:,.0f}",
        f"  memory     {device.bandwidth / 1e9:,.1f} GB/s",
        f"  a layer    {device.host.layer * 1e3:.2f} ms for calls alone, {len(device.layers)} shapes measured",
    ]
    if device.cores:
        pairs = ", ".join(f"{busy} ranks {factor:.2f}" for busy, factor in device.cores.slowdown)
        lines.append(f"  together   {pairs} times as long")
    lines += [
        f"  a sum      {each.latency * 1e6:,.0f} us + {each.bandwidth / 1e9:.2f} GB/s, "
        f"{each.members} of {each.ranks} ranks"
        for each in device.links.sums
    ]
    return lines
