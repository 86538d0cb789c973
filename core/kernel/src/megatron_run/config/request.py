"""The user's request as typed: all that another process needs to resolve the same run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: Variables that configure a run start with this.
ENVIRONMENT_PREFIX = "MEGATRON_RUN_"


class Found(dict[str, Any]):
    """A mapping that nobody here has written: it was found at ``place``, a checkpoint or somebody's run folder.

    Its plugins must be installed. A file that it names is not run.
    """

    def __init__(self, sections: Iterable[tuple[str, Any]] | Mapping[str, Any] = (), place: str = "a found folder"):
        super().__init__(sections)
        self.place = place


@dataclass(frozen=True)
class Request:
    """The arguments of the command line, or their equivalents from Python.

    ``configs`` are CONFIG words (a path, ``preset:NAME``, ``-``) or mappings, some of them :class:`Found`; ``sets``
    are ``KEY=VALUE`` texts and ``values`` their typed form by dotted key; ``plugins`` are ``KIND=NAME[,OPT=VAL...]``;
    ``nproc`` is the number of ranks of the world, None when it follows from the parallel sizes; ``there`` is how many
    there are where somebody else decides that, of which ``run.elastic`` may leave some, and ``planned`` are the
    settings that were found for so many, which win; ``stdin`` is the text behind ``-``; ``environment`` needs only the
    variables that start with ``MEGATRON_RUN_``. ``resume`` is ``auto``, ``never`` or the
    number of the saved step to resume from; ``allow_plugin_change`` are kinds whose saved state may be dropped,
    ``allow_change`` keys and sections that may differ from the run that is resumed; ``extend`` allows it more steps.
    ``latest`` is empty as typed; that of a resolved run has the run that each ``runs/latest`` in it named, so that
    whoever resolves it again reads of the same one.
    """

    configs: tuple[str | Mapping[str, Any], ...] = ()
    sets: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    nproc: int | None = None
    stdin: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    resume: str = "auto"
    allow_plugin_change: tuple[str, ...] = ()
    allow_change: tuple[str, ...] = ()
    extend: bool = False
    latest: Mapping[str, str] = field(default_factory=dict)
    there: int | None = None
    planned: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        variables = {name: text for name, text in self.environment.items() if name.startswith(ENVIRONMENT_PREFIX)}
        object.__setattr__(self, "environment", variables)

    def to_json(self) -> str:
        """One line of JSON that :meth:`from_json` reads back."""
        configs = [[each.place, each] if isinstance(each, Found) else each for each in self.configs]
        return json.dumps({**asdict(self), "configs": configs})

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Read what :meth:`to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        for name in ("configs", "sets", "plugins", "allow_plugin_change", "allow_change"):
            data[name] = tuple(data[name])
        configs = (Found(each[1], each[0]) if isinstance(each, list) else each for each in data["configs"])
        return cls(**{**data, "configs": tuple(configs)})
