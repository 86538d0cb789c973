"""The options of graph capture ``partial``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_run_engine.capture import check_capture

if TYPE_CHECKING:
    from megatron_run.contracts.schema import Config


class PartialOptions(BaseModel):
    """What is captured, how often, and what happens on a mismatch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: tuple[str, ...] = Field(
        ("attn",),
        min_length=1,
        description="segments to capture; those of gpt are embedding, attn, mlp, moe_router, moe_preprocess, "
        "moe_combine, head and loss",
    )
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
    """Notice if nothing would be captured. Raises InputError for settings that exclude replay or break ``strict``."""
    yield from check_capture("partial", config, options)
