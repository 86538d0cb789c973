"""The options of graph capture ``te``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.graphs import refuse_misfits

if TYPE_CHECKING:
    from megatron_run.config.schema import Config


class TeOptions(BaseModel):
    """What is captured, when, and what happens when it no longer fits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: tuple[str, ...] = Field(("attn",), min_length=1, description="names of the segments to capture")
    capture_after: int = Field(3, ge=1, description="steps that run eagerly before the capture")
    strict: bool = Field(False, description="an error where something no longer fits, instead of another capture")
    warmup: int = Field(3, ge=1, description="times that each region is run before it is recorded")


def check_config(config: Config, options: TeOptions) -> Iterator[str]:
    """No notices. Raises InputError for what would never be replayed, or end ``strict``."""
    refuse_misfits("te", config, options)
    yield from ()
