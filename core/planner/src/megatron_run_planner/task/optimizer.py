"""The optimizer of a configuration, with the options that say what is lent, and those that a search may choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_run.config.merge import ConfigSource
from megatron_run.config.values import core_scalar
from megatron_run_planner.workload import OPTIMIZERS, Lending, Optimizer


def optimizer_of(merged: ConfigSource) -> Optimizer:
    """That of ``merged``; any other than those the planner knows is read as ``adamw``."""
    return next((each for each in OPTIMIZERS if each == _chosen(merged)), "adamw")


def lending(merged: ConfigSource) -> Lending:
    """The options of ``zero3`` in ``merged``; a run says what is wrong with one."""
    given = _options(merged)
    held, below = given.get("segments_held"), given.get("whole_below")
    usual = Lending()
    return Lending(
        held if isinstance(held, int) else usual.segments_held,
        "step" if given.get("reduce") == "step" else "microbatch",
        below if isinstance(below, int) else usual.whole_below,
    )


def on_host(merged: ConfigSource) -> bool:
    """Whether masters and state are in host memory."""
    value = merged.values.get(("optimizer", "state_on_host"))
    data = None if value is None else value.data
    return (core_scalar(data) if isinstance(data, str) else data) is True


def optimizers(merged: ConfigSource) -> tuple[Optimizer, ...]:
    """Those from which a search may choose: ``zero3`` alone where its options are set, never with captured graphs.

    Nor where the optimizer is another than the planner knows.
    """
    if _chosen(merged) == "zero3" and _options(merged):
        return ("zero3",)
    captures = any(choice.reference != "none" for choice in merged.choices.get("graph-capture", ()))
    return ("adamw", "zero1") if captures or _chosen(merged) not in OPTIMIZERS else OPTIMIZERS


def chosen_by_split(data: Mapping[str, Any]) -> bool:
    """Whether the optimizer of the sections ``data`` is one of those between which a split decides."""
    return data.get("optimizer", {}).get("use", "adamw") in OPTIMIZERS


def _chosen(merged: ConfigSource) -> str:
    return next((choice.reference for choice in merged.choices.get("optimizer", ())), "adamw")


def _options(merged: ConfigSource) -> Mapping[str, Any]:
    """The options of lending that are set, as YAML reads them."""
    given = {name: merged.values.get(("optimizer", name)) for name in (field.name for field in fields(Lending))}
    found = {name: value.data for name, value in given.items() if value is not None and not value.inherited}
    return {name: core_scalar(data) if isinstance(data, str) else data for name, data in found.items()}
