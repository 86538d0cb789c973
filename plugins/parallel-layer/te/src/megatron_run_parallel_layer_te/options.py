"""The options in section ``parallel-layer``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.errors import InputError

if TYPE_CHECKING:
    from megatron_run.contracts.schema import Config

Fp8 = Literal["none", "delayed", "current", "mxfp8", "block"]


class Options(BaseModel):
    """Precision of the matrix products, and how weight gradients are computed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fp8: Fp8 = Field("none", description="FP8 scaling of matrix products")
    fp8_format: Literal["auto", "hybrid", "e4m3"] = Field(
        "auto", description="hybrid: gradients in E5M2; auto: hybrid with delayed and current, else e4m3"
    )
    fp8_margin: int = Field(0, ge=0, description="delayed: headroom of scales, in powers of two")
    fp8_amax_history: int = Field(1024, ge=1, description="delayed: microbatches whose largest value is kept")
    fp8_amax: Literal["max", "most_recent"] = Field("max", description="delayed: kept value that sets the scale")
    fuse_weight_gradients: bool = Field(True, description="matrix products add weight gradients to main_grad")
    delay_weight_gradients: bool = Field(
        False, description="compute weight gradients at action W of schedules that split the backward"
    )


def check_config(config: Config, options: Options) -> Iterator[str]:
    """No notices. Raises InputError for delayed FP8 with graph capture: scales update once per whole forward."""
    capture = config.graph_capture.use
    if options.fp8 == "delayed" and capture != "none":
        raise InputError(
            f"parallel-layer.fp8=delayed does not go with graph-capture={capture}",
            why="scales are renewed once after a whole forward, and each graph of a part of it would renew them again",
            fix="set parallel-layer.fp8=current, or choose --plugin graph-capture=none",
        )
    yield from ()
