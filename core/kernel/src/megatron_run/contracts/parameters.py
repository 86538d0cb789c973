"""How a parameter relates to the model's logical tensors, to its copies on other ranks, and to the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from megatron_run.contracts.topology import Axis, Replicas

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Init:
    """Initial values of a logical tensor: N(0, std), uniform around 0 with standard deviation std, zeros or ones."""

    kind: Literal["normal", "uniform", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True)
class Part:
    """Rows of a local parameter that belong to one logical tensor.

    Local rows ``local.start:local.stop`` hold rows ``start:start + len(local)``, and columns from ``column`` on, of the
    logical tensor ``name`` of global ``shape``. Local rows in no part are padding: they are zero and not checkpointed.
    """

    name: str
    shape: tuple[int, ...]
    local: range
    start: int = 0
    column: int = 0


@dataclass(frozen=True)
class ParameterSpec:
    """A module's declaration of one of its parameters.

    A module sets ``parameter_specs: dict[str, ParameterSpec]``, whose keys are the names of its own parameters, to
    override the defaults. The module's path in the tree is the prefix of all names; names in ``parts`` are relative to
    it, as ``"query.weight"``. Without parts the parameter is one whole logical tensor. ``name``, if set, is the
    absolute canonical name, for a parameter whose name does not follow from its path (a tied embedding). The other
    fields are those of :class:`ParamInfo`; ``decay=None`` means the default by shape and name.

    A parameter that covers its whole logical tensors is treated as replicated over the tensor-parallel ranks, and
    ``counted`` on the first only. So a whole tensor that only another tensor-parallel rank holds cannot be declared:
    experts are split over the expert-parallel ranks, and each expert over the tensor-parallel ranks.
    """

    init: Init
    parts: tuple[Part, ...] = ()
    decay: bool | None = None
    partial_over: Axis | None = None
    tie: str = ""
    counted: bool = True
    name: str = ""
    replicas: Replicas = "replicas"
    moved: bool = False
    row_factors: Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class ParamInfo:
    """Everything that the engine and an optimizer know about one parameter.

    ``name`` is canonical: equal for every parallel layout and layer factory. ``decay``: weight decay applies (by
    default not to 1-D parameters and biases). ``partial_over`` is the axis over which the gradient must be summed,
    because each rank computes a part of it: ``tie`` for a tied embedding on two stages, ``tensor`` for norms under
    sequence parallelism. ``tie`` is equal on all copies of a tied parameter. ``counted`` is true on exactly one copy,
    which enters the gradient norm and the checkpoint. ``replicas`` is the axis whose ranks hold the same parameter and
    reduce its gradient together; an expert has fewer replicas than the other parameters. ``moved``: the model itself
    changes it between steps (:meth:`Model.before_update`), so every replica holds it whole. Each update ends with a
    multiplication of the parameter's rows by ``row_factors`` [rows], to which ``before_update`` gives values.
    """

    name: str
    parts: tuple[Part, ...]
    init: Init
    decay: bool
    partial_over: Axis | None = None
    tie: str = ""
    counted: bool = True
    replicas: Replicas = "replicas"
    moved: bool = False
    row_factors: Tensor | None = field(default=None, compare=False, repr=False)
