"""What ``plan`` prints: predictions beside measured steps."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from megatron_run_planner.accuracy import Accuracy, Compared
    from megatron_run_planner.hardware import Device

_WORST = 10


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
            f"{model.layers:6}  {model.hidden:6}  {split.ranks:4}  {split.tensor:6}  {split.pipeline:8}  {split.data:4}"
            f"  {split.micro_batch:5}  {split.global_batch:5}  {split.recompute:9}  {row.seconds:8.3f}s  "
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
                "model": asdict(row.model),
                "split": asdict(row.split),
                "measured": row.seconds,
                "predicted": predicted,
                "error": predicted / row.seconds - 1,
            }
            for row, predicted in found.rows
        ],
    }
