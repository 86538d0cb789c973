"""The options of every optimizer that updates flat buffers: which rule, with which numbers, and what travels when."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from megatron_run.errors import advice, did_you_mean
from megatron_run_engine.runtime.gradients import DEFAULT_CAPACITY

#: The rules with a name of their own.
RULES = ("adamw", "adam", "sgd", "muon")


def _rule(text: str) -> str:
    """One of :data:`RULES`, or ``MODULE:CLASS``."""
    module, _, name = text.partition(":")
    if text not in RULES and not (module and name):
        listed = f"the rules are {', '.join(RULES)}, or MODULE:CLASS"
        raise ValueError(f"{text!r} is no rule; {advice(did_you_mean(text, RULES), listed)}")
    return text


def _multiplier(text: str) -> str:
    """``PATTERN:FACTOR`` with a factor that is a number of at least 0."""
    pattern, _, factor = text.rpartition(":")
    try:
        valid = bool(pattern) and float(factor) >= 0
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"{text!r} is not PATTERN:FACTOR, as in embedding.*:0.1")
    return text


#: ``PATTERN:FACTOR``, as in ``embedding.*:0.1``.
Multiplier = Annotated[str, AfterValidator(_multiplier)]
#: How much of a moment is kept at each step.
Decay = Annotated[float, Field(ge=0, lt=1)]


class UpdateOptions(BaseModel):
    """The update rule and its numbers, the type of gradients, and the size of a bucket."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rule: Annotated[str, AfterValidator(_rule)] = Field(
        "adamw", description="adamw, adam, sgd, muon, or MODULE:CLASS of a torch optimizer"
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="decay of the moments, for adamw and adam")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment, for adamw and adam")
    momentum: float | None = Field(None, ge=0, lt=1, description="for sgd (unset: 0) and muon (unset: 0.95)")
    nesterov: bool = Field(False, description="Nesterov momentum, for sgd; muon always has it")
    rule_options: dict[str, Any] = Field(default_factory=dict, description="further arguments of the rule's class")
    adamw_for: tuple[str, ...] = Field(
        ("embedding.*", "output.*"), description="names, with * and ?, of matrices that muon leaves to adamw"
    )
    lr_mult: tuple[Multiplier, ...] = Field(
        (),
        description="PATTERN:FACTOR on the learning rate, by name; the last match counts",
    )
    grad_dtype: Literal["main", "param"] = Field(
        "main", description="type of gradient accumulation and reduction; main: fp32, param: the parameters'"
    )
    bucket_size: int = Field(DEFAULT_CAPACITY, ge=1, description="values that complete a gradient bucket")
    overlap_grad_reduce: bool = Field(True, description="reduce complete buckets during the backward")

    def factor(self, name: str) -> float:
        """The learning rate's factor for the parameter ``name``."""
        for pattern, _, factor in (text.rpartition(":") for text in reversed(self.lr_mult)):
            if fnmatchcase(name, pattern):
                return float(factor)
        return 1.0

    def is_left_to_adamw(self, name: str) -> bool:
        """Whether rule muon leaves the matrix ``name`` to adamw."""
        return any(fnmatchcase(name, pattern) for pattern in self.adamw_for)
