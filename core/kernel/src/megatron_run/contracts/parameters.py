"""How a parameter relates to the logical tensors of the model, to its copies and to its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_run.contracts.topology import Axis, Replicas


@dataclass(frozen=True)
class Init:
    """How a logical tensor starts: N(0, std), zeros or ones."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True)
class Part:
    """Rows of a local parameter that belong to one logical tensor.

    Local rows ``local.start:local.stop`` hold rows ``start:start + len(local)`` (and columns from ``column``) of the
    logical tensor ``name`` with global ``shape``. Local rows in no part are padding: zero, and never checkpointed.
    """

    name: str
    shape: tuple[int, ...]
    local: range
    start: int = 0
    column: int = 0


@dataclass(frozen=True)
class ParameterSpec:
    """What a module says of one of its parameters; the module's place in the tree gives the name.

    A module that sets ``parameter_specs: dict[str, ParameterSpec]`` (keys are its own parameters' names) overrides the
    defaults; names in ``parts`` are relative to the module, as ``"query.weight"``. No parts: the parameter is one whole
    logical tensor. ``name``, when set, is the absolute canonical name, for a parameter that lives elsewhere in the tree
    than it is named (a tied embedding).

    What is whole by its ``parts`` is taken for a copy that every tensor-parallel rank holds, and ``counted`` on the
    first alone. So a logical tensor that only another of them holds cannot be said yet: experts are split over the
    expert-parallel ranks, and within each over the tensor-parallel ones.
    """

    init: Init
    parts: tuple[Part, ...] = ()
    decay: bool | None = None
    partial_over: Axis | None = None
    tie: str = ""
    counted: bool = True
    name: str = ""
    replicas: Replicas = "data"


@dataclass(frozen=True)
class ParamInfo:
    """Everything the kernel and an optimizer know about one parameter.

    ``name`` is canonical: equal for every parallel layout and layer factory. ``decay``: weight decay applies (not to
    1-D parameters and biases). ``partial_over`` is the axis whose sum makes the gradient whole (``tie`` for a tied
    embedding on two stages, ``tensor`` for norms under sequence parallelism). ``tie`` names the parameters
    that are one. ``counted`` is true on exactly one copy: that one enters the gradient norm.
    ``replicas`` is the axis whose ranks hold the same parameter and reduce its gradient together: fewer hold that of an
    expert than hold the rest.
    """

    name: str
    parts: tuple[Part, ...]
    init: Init
    decay: bool
    partial_over: Axis | None = None
    tie: str = ""
    counted: bool = True
    replicas: Replicas = "data"
