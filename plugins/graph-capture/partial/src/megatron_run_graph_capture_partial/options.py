"""The options of graph capture ``partial``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.errors import InputError

if TYPE_CHECKING:
    from megatron_run.config.schema import Config


class PartialOptions(BaseModel):
    """What is captured, how often, and what happens when it no longer fits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: tuple[str, ...] = Field(("attn",), min_length=1, description="names of the segments to capture")
    graph_reuse: Literal["per_microbatch", "per_slot"] = Field(
        "per_microbatch", description="graphs for each microbatch, or only for as many as are in flight at once"
    )
    capture_after: int = Field(1, ge=1, description="steps that run eagerly before the capture")
    strict: bool = Field(False, description="an error where something no longer fits, instead of another capture")
    chain: bool = Field(True, description="read a region's inputs where the one before left them, without a copy")
    executor: Literal["python", "native"] = Field(
        "python", description="what replays on a CPU; native is compiled when it is first used"
    )


def check_config(config: Config, options: PartialOptions) -> Iterator[str]:
    """Refuse what would end under ``strict`` in any case; a notice where nothing would ever be replayed."""
    if options.strict and config.train.ramp_up is not None:
        raise InputError(
            "graph-capture.strict=true with train.ramp_up",
            why="the number of microbatches changes on the way, and each change needs another capture",
            fix="leave one of them out",
        )
    if config.train.recompute == "full":
        raise InputError(
            "graph-capture=partial with train.recompute=full",
            why="a layer that is recomputed in the backward must run eagerly",
            fix="set train.recompute=none, or choose --plugin graph-capture=none",
        )
    yield from ()
