"""The options of graph capture ``te``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from megatron_run_engine.capture import check_capture

if TYPE_CHECKING:
    from megatron_run.contracts.schema import Config


class TeOptions(BaseModel):
    """What is captured, when, and what happens on a mismatch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: tuple[str, ...] = Field(
        ("attn",),
        min_length=1,
        description="segments; those of gpt: attn, mlp, head, loss, and of experts moe_router, moe_preprocess, "
        "moe_dispatch, moe_experts, moe_combine",
    )
    capture_after: int = Field(3, ge=1, description="eager steps before the capture")
    strict: bool = Field(False, description="a mismatch raises an error instead of another capture")
    warmup: int = Field(3, ge=1, description="runs of each region before it is recorded")


def check_config(config: Config, options: TeOptions) -> Iterator[str]:
    """Notice if nothing would be captured. Raises InputError for settings that exclude replay or break ``strict``."""
    yield from check_capture("te", config, options)
