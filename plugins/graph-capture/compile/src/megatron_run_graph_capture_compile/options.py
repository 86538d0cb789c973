"""The options of graph capture ``compile``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_run_engine.capture import check_capture

if TYPE_CHECKING:
    from megatron_run.contracts.schema import Config

#: The scope without ``graph-capture.scope``: what layers hold, as far as the model publishes it. The other segments of
#: experts have shapes that follow the routing; the head and the loss take long to compile and gain little.
LAYERS = ("attn", "mlp", "moe_router", "moe_preprocess", "moe_combine")


class CompileOptions(BaseModel):
    """What is compiled, how, and how often again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="segments; unset: all of the layers that can be compiled. Those of gpt: embedding, attn, mlp, "
        "moe_router, moe_preprocess, moe_combine, head, loss",
    )
    backend: str = Field("inductor", min_length=1, description="of torch.compile; aot_eager compiles nothing")
    mode: Literal["default", "max-autotune-no-cudagraphs"] = Field(
        "default", description="of inductor; max-autotune-no-cudagraphs tries more kernels, for minutes"
    )
    capture_after: int = Field(1, ge=1, description="eager steps before the compilation")
    recompile_limit: int = Field(8, ge=1, description="shapes that a segment is compiled for; others run eagerly")
    strict: bool = Field(False, description="another shape raises an error instead of another compilation")


def check_config(config: Config, options: CompileOptions) -> Iterator[str]:
    """Notice if nothing would be compiled. Raises InputError for a name given twice, or what breaks ``strict``."""
    yield from check_capture("compile", config, options, recomputes=True, default=LAYERS)
