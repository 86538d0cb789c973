"""Groups of options: models inside a plugin's options, set as ``model.rope.theta``; rules between groups; meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

#: The kind of error that names its key.
AT_KEY = "at_key"


class Group(BaseModel):
    """A frozen group of keys; an unknown key is an error. What one group knows by itself its own validators check."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class _Mark:
    """A mark of a field."""

    text: str


#: Of a text that names files or folders, which shells complete, and of which ``runs/latest`` is the run that it stands
#: for: ``Annotated[str, OF_FILES]``. A ``Path`` needs none.
OF_FILES = _Mark("names files")


@runtime_checkable
class SaysExplicit(Protocol):
    """Options of any kind that say what they mean, whatever was left unset, and set without an effect.

    Where a run goes on, or starts from weights, values of equal meaning are no change.
    """

    def explicit(self) -> Mapping[str, Any]:
        """The options by dotted name: with the value that an unset one has, and the default of one that is not read."""
        ...


def fault_at(options: BaseModel, key: str, why: str) -> PydanticCustomError:
    """The error of a rule over several keys, told as one of ``key`` (``"rope.theta"``), with its value and origin.

    For a validator that sees all of ``options``: ``raise fault_at(self, "experts.top_k", "a token cannot ...")``.
    """
    value = attrgetter(key)(options)
    return PydanticCustomError(AT_KEY, "{key}: {why}", {"key": key, "why": why, "value": value})
