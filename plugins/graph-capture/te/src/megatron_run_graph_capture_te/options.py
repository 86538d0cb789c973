"""The options of graph capture ``te``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.errors import InputError

if TYPE_CHECKING:
    from megatron_run.config.schema import Config


class TeOptions(BaseModel):
    """What is captured, when, and what happens when it no longer fits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: tuple[str, ...] = Field(("attn",), min_length=1, description="names of the segments to capture")
    capture_after: int = Field(3, ge=1, description="steps that run eagerly before the capture")
    strict: bool = Field(False, description="an error where something no longer fits, instead of another capture")
    warmup: int = Field(3, ge=1, description="times that each region is run before it is recorded")


def check_config(config: Config, options: TeOptions) -> Iterator[str]:  # noqa: ARG001  # the contract's
    """Refuse layers that are recomputed in the backward: they must run eagerly."""
    if config.train.recompute == "full":
        raise InputError(
            "graph-capture=te with train.recompute=full",
            why="a layer that is recomputed in the backward must run eagerly",
            fix="set train.recompute=none, or choose --plugin graph-capture=none",
        )
    yield from ()
