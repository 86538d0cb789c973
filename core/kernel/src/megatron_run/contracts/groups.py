"""Groups of options: models inside a plugin's options, set as ``model.rope.theta``, and rules between groups."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

#: The kind of error that names its key.
AT_KEY = "at_key"


class Group(BaseModel):
    """A frozen group of keys; an unknown key is an error. What one group knows by itself its own validators check."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def fault_at(key: str, why: str) -> PydanticCustomError:
    """The error of a model's validator, told as one of its ``key`` (``"rope.theta"``), with that value and its origin.

    For a rule over several groups: ``raise fault_at("experts.top_k", "a token cannot ...")``.
    """
    return PydanticCustomError(AT_KEY, "{why}", {"key": key, "why": why})
