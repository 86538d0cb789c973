"""Where each value of a configuration came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_run.contracts.plugin import RUN_KINDS

#: A key as its parts: ``("train", "lr")``. Sections of kinds are spelt with ``_``.
Key = tuple[str, ...]

SourceName = Literal["default", "suggestion", "file", "environment", "command line", "python", "found"]


@dataclass(frozen=True)
class Origin:
    """The source of a value, and the place in it as messages name it: ``--set train.lr``."""

    source: SourceName
    place: str

    def __str__(self) -> str:
        return self.place


DEFAULT = Origin("default", "default")


class Text(str):
    """Text from the command line or the environment, parsed later according to the type of its field."""

    __slots__ = ()


@dataclass(frozen=True)
class Value:
    """A leaf of the configuration. ``inherited``: written for a plugin that a stronger source has replaced."""

    data: Any
    origin: Origin
    inherited: bool = False


@dataclass(frozen=True)
class Choice:
    """A requested plugin: NAME, DIST:NAME or ./file.py."""

    reference: str
    origin: Origin


def section_of(kind: str) -> str:
    """The name of the section of a kind, as a Python name: ``parallel_layer``."""
    return kind.replace("-", "_")


#: Section of a kind -> the kind.
KIND_SECTIONS = {section_of(kind): kind for kind in RUN_KINDS}


def dotted(key: Key) -> str:
    """The key as users write it: ``train.lr``, ``parallel-layer.use``."""
    return ".".join((KIND_SECTIONS.get(key[0], key[0]), *key[1:]))
