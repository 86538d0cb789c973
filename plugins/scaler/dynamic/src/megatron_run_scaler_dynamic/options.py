"""The options of scaler ``dynamic``: the names and defaults of Megatron-LM's flags."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from megatron_run.contracts import scale_text

#: Within these bounds a scale and its reciprocal are normal numbers of fp32.
SMALLEST, LARGEST = 1e-30, 1e30


class Options(BaseModel):
    """The options in section ``scaler``."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    initial_loss_scale: float = Field(2.0**32, ge=SMALLEST, le=LARGEST, description="first factor on losses")
    min_loss_scale: float = Field(1.0, ge=SMALLEST, le=LARGEST, description="lower bound of the scale")
    loss_scale_window: int = Field(1000, ge=1, description="steps in a row without overflow before the scale grows")
    hysteresis: int = Field(2, ge=1, description="overflows before a backoff, counted since the last growth")
    growth_factor: float = Field(2.0, gt=1, description="factor of a growth")
    backoff_factor: float = Field(0.5, gt=0, lt=1, description="factor of a backoff")

    @field_validator("min_loss_scale")
    @classmethod
    def _below_initial(cls, smallest: float, info: ValidationInfo) -> float:
        first = info.data.get("initial_loss_scale", smallest)
        if smallest > first:
            raise ValueError(f"it must be at most scaler.initial_loss_scale, which is {scale_text(first)}")
        return smallest

    def factors(self) -> dict[str, float]:
        """The options that determine scales, by name."""
        return self.model_dump(exclude={"loss_scale_window", "hysteresis"})
