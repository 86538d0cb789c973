"""Files of ``runs/latest`` that options of plugins name, each by the mark of its field."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from megatron_run.contracts.option_groups import OF_FILES
from megatron_run.files.latest_run import follow_latest

Options = TypeVar("Options", bound=BaseModel)


def name_runs_in(options: Options, latest: MutableMapping[str, str]) -> Options:
    """A plugin's ``options`` with the run itself where one that names files says ``runs/latest``.

    Such a one is a path, or has the mark :data:`~megatron_run.contracts.option_groups.OF_FILES`. ``latest`` is what
    :func:`follow_latest` knows.
    """
    changed: dict[str, Any] = {}
    for name, field in type(options).model_fields.items():
        value = getattr(options, name)
        if isinstance(value, BaseModel):
            found: Any = name_runs_in(value, latest)
        elif OF_FILES in field.metadata or isinstance(value, Path):
            found = _in_run(value, latest)
        else:
            continue
        if found != value:
            changed[name] = found
    return options.model_copy(update=changed) if changed else options


def _in_run(value: Any, latest: MutableMapping[str, str]) -> Any:
    """A path, as text too, or several, with the run that each lies in; any other value as it is."""
    if isinstance(value, tuple):
        return tuple(_in_run(each, latest) for each in value)
    if not isinstance(value, str | Path):
        return value
    named = Path(value).expanduser()
    lies = follow_latest(named, latest)
    return value if lies == named else type(value)(lies)
