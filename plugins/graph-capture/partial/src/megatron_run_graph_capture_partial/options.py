"""The options of graph capture ``partial``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.errors import InputError
from megatron_run_engine.capture import STEP, check_capture

if TYPE_CHECKING:
    from megatron_run.contracts.schema import Config


class PartialOptions(BaseModel):
    """What is captured, how often, and what happens on a mismatch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: tuple[str, ...] = Field(
        ("attn",),
        min_length=1,
        description="segments; those of gpt: embedding, attn, mlp, head, loss, and of experts moe_router, "
        "moe_preprocess, moe_dispatch, moe_experts, moe_combine; or step: forward and backward of all of it as one",
    )
    graph_reuse: Literal["per_microbatch", "per_slot"] = Field(
        "per_microbatch", description="graphs per microbatch of a round, or per microbatch in flight"
    )
    capture_after: int = Field(1, ge=1, description="eager steps before the capture")
    strict: bool = Field(False, description="a mismatch raises an error instead of another capture")
    chain: bool = Field(True, description="read a region's inputs in place from the previous one")
    executor: Literal["python", "native"] = Field(
        "python", description="of CPU replays; native is compiled on first use"
    )


def check_config(config: Config, options: PartialOptions) -> Iterator[str]:
    """Notice if nothing would be captured. Raises InputError for settings that exclude replay or break ``strict``."""
    yield from check_capture("partial", config, options, recomputes=True, whole_step=True)
    if STEP in options.scope and options.graph_reuse == "per_slot":
        raise InputError(
            "graph-capture.scope=step with graph_reuse=per_slot",
            why="a whole step is one graph, which no microbatch replays for another",
            fix="leave one of them out",
        )
