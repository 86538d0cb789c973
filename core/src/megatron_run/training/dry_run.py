"""What ``--dry-run`` says: the resolved run, the parameters each rank would hold, and a picture of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_run.pipeline.timeline import timeline, timeline_text
from megatron_run.training.size import parameters_by_stage

if TYPE_CHECKING:
    from megatron_run.resolve import ResolvedRun


def dry_run_text(run: ResolvedRun) -> str:
    """For people. Raises what building the model and opening the data raise."""
    open_data(run)
    counts = parameters_by_stage(run)
    held = ", ".join(f"{count:,} on stage {stage}" for stage, count in enumerate(counts))
    parts = [run.describe(), f"parameters of a rank: {held}"]
    if run.sizes.pipeline > 1:
        parts.append(f"one step\n{timeline_text(timeline(run.plans[max(run.plans)]))}")
    return "\n\n".join(parts)


def open_data(run: ResolvedRun) -> None:
    """Open the splits that a run reads, so that a missing or empty file is found before anything is started."""
    source, train = run.one("data").create(), run.config.train
    for split in ("train", "validation"):
        source.dataset(split, train.sequence_length, train.seed)


def dry_run_json(run: ResolvedRun) -> dict[str, Any]:
    """The same as data."""
    open_data(run)
    return {**run.to_json(), "parameters_by_stage": list(parameters_by_stage(run))}
