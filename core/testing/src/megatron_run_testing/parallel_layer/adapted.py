"""The oracle of adapters: the dense layer with merged matrices, and from its gradients those of both factors.

For W' = W + scale * B A, the chain rule gives dB = scale * dW' A^T and dA = scale * B^T dW'; dW = dW'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_run.contracts import Init, ParamInfo, Part
from megatron_run_engine.runtime.parameter_init import initialise

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts import Adapters


@dataclass(frozen=True)
class Factors:
    """B [o, r] and A [r, i] of one matrix [o, i], and their names."""

    up: str
    down: str
    b: Tensor
    a: Tensor


def factors(
    infos: Mapping[Parameter, ParamInfo], adapters: Adapters, names: Collection[str], seed: int, init: Init
) -> dict[str, Factors]:
    """The factors of the matrices in ``infos`` that ``names`` say are adapted, by the names of these matrices."""
    found: dict[str, Factors] = {}
    for part in (part for info in infos.values() for part in info.parts):
        stem = part.name.removesuffix(".weight")
        up, down = f"{stem}.{adapters.up}.weight", f"{stem}.{adapters.down}.weight"
        if stem != part.name and up in names:
            outputs, inputs = part.shape
            b = _filled(up, (outputs, adapters.rank), seed, init)
            found[part.name] = Factors(up, down, b, _filled(down, (adapters.rank, inputs), seed, init))
    return found


def merge(infos: Mapping[Parameter, ParamInfo], made: Mapping[str, Factors], scale: float) -> None:
    """Add the factors to the matrices of one rank that holds all of them."""
    with torch.no_grad():
        for parameter, info in infos.items():
            for part in info.parts:
                if part.name in made:
                    rows = parameter[part.local.start : part.local.stop]
                    rows += (scale * made[part.name].b @ made[part.name].a).to(rows)


def gradients(made: Factors, of_merged: Tensor, scale: float) -> Iterator[tuple[str, Tensor]]:
    """The names and gradients of both factors, from that of their merged matrix [o, i]."""
    yield made.up, scale * of_merged @ made.a.t()
    yield made.down, scale * made.b.t() @ of_merged


def _filled(name: str, shape: tuple[int, int], seed: int, init: Init) -> Tensor:
    """The values that a trial gives the logical tensor ``name``, as the engine does, in float64."""
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=torch.float64))
    whole = ParamInfo(name, (Part(name, shape, range(shape[0])),), init, decay=True)
    initialise({parameter: whole}, seed)
    return parameter.detach()
