"""The options in section ``optimizer``: those of the other optimizers, and DeepSpeed's under its own names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from megatron_run_engine.optim import UpdateOptions
from megatron_run_engine.optim.update_rules import Decay, Multiplier


def _why_not_three(stage: object) -> object:
    if stage in (3, "3"):
        raise ValueError(
            "ZeRO stage 3 cannot run here, since its hooks on modules fetch the parameters and free them, and here "
            "parameters stay where segments read them; set optimizer.stage to 1 or 2"
        )
    return stage


class Options(BaseModel):
    """Stage of ZeRO, update rule, and bucketing."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    stage: Annotated[Literal[1, 2], BeforeValidator(_why_not_three)] = Field(
        1, description="ZeRO stage; 2 also drops reduced gradients that other ranks use, as DeepSpeed does"
    )
    rule: Literal["adamw", "adam", "sgd"] = Field("adamw", description="PyTorch's, fused")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="decay of the moments, for adamw and adam")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment, for adamw and adam")
    momentum: float | None = Field(None, ge=0, lt=1, description="for sgd; unset: 0")
    nesterov: bool = Field(False, description="Nesterov momentum, for sgd")
    lr_mult: tuple[Multiplier, ...] = Field(
        (),
        description="PATTERN:FACTOR on the learning rate, by name; the last match counts",
    )
    reduce_bucket_size: int = Field(2**24, ge=1, description="gradient values reduced together")
    use_multi_rank_bucket_allreduce: bool = Field(
        True, description="reduce a bucket to all ranks at once; false: to each rank its part"
    )

    @property
    def update(self) -> UpdateOptions:
        """The update options that all optimizers have."""
        return UpdateOptions(**self.model_dump(include=set(UpdateOptions.model_fields), exclude_unset=True))
