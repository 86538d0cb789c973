"""Options of a plugin with other values at dotted names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from megatron_run.config.values import flat, nested

Options = TypeVar("Options", bound=BaseModel)


def changed(options: Options, update: Mapping[str, Any]) -> Options:
    """``options`` with the values of ``update``, such as ``{"experts.count": 4}``, validated."""
    return type(options).model_validate(nested({**flat(options.model_dump()), **update}))
