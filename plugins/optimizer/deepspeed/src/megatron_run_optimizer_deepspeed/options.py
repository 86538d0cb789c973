"""The options in section ``optimizer``: those of the other optimizers, and DeepSpeed's under its own names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from megatron_run_engine.optim import UpdateOptions
from megatron_run_engine.optim.options import Decay, Multiplier


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
        1, description="of ZeRO; 2 also forgets each reduced gradient that other ranks use, as DeepSpeed's does"
    )
    rule: Literal["adamw", "adam", "sgd"] = Field("adamw", description="PyTorch's, fused")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="decay of the two moments, of adamw and adam")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment, of adamw and adam")
    momentum: float = Field(0.0, ge=0, lt=1, description="of sgd")
    nesterov: bool = Field(False, description="Nesterov's momentum, of sgd")
    lr_mult: tuple[Multiplier, ...] = Field(
        (),
        description="PATTERN:FACTOR, a factor of the learning rate for such names; the last match counts",
    )
    reduce_bucket_size: int = Field(2**24, ge=1, description="gradients that are reduced together, in values")
    use_multi_rank_bucket_allreduce: bool = Field(
        True, description="reduce a bucket to all ranks at once; false: to each rank what it updates"
    )

    @property
    def update(self) -> UpdateOptions:
        """The update options that all optimizers have."""
        return UpdateOptions(**self.model_dump(include=set(UpdateOptions.model_fields), exclude_unset=True))
