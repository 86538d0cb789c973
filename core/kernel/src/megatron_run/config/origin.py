"""Where each value of a configuration came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_run.contracts.plugin import RUN_KINDS

#: A key as its parts: ``("train", "lr")``. Sections of kinds are spelt with ``_``.
Key = tuple[str, ...]

LayerName = Literal["default", "suggestion", "file", "environment", "command line", "python"]


@dataclass(frozen=True)
class Origin:
    """The layer a value came from and the place in it, as one would point at it: ``--set train.lr``."""

    layer: LayerName
    place: str

    def __str__(self) -> str:
        return self.place


DEFAULT = Origin("default", "default")


class Text(str):
    """A value as it was typed on the command line or in the environment: read later, by the type of its field."""

    __slots__ = ()


@dataclass(frozen=True)
class Value:
    """A leaf of the configuration. ``inherited``: written while another plugin of its kind was chosen."""

    data: Any
    origin: Origin
    inherited: bool = False


@dataclass(frozen=True)
class Choice:
    """A plugin that was asked for: NAME, DIST:NAME or ./file.py."""

    word: str
    origin: Origin


def section_of(kind: str) -> str:
    """The name of the section of a kind, as a Python name: ``parallel_layer``."""
    return kind.replace("-", "_")


#: Section of a kind -> the kind.
KIND_SECTIONS = {section_of(kind): kind for kind in RUN_KINDS}


def dotted(key: Key) -> str:
    """The key as it is written: ``train.lr``, ``parallel-layer.use``."""
    return ".".join((KIND_SECTIONS.get(key[0], key[0]), *key[1:]))
