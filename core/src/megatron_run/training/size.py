"""How large each rank's part of the model is, without allocating any of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_run.comm import Groups
from megatron_run.parameters import describe_parameters
from megatron_run.topology import Topology
from megatron_run.training.build import build_chunks, make_context, with_vocabulary

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import ParamInfo
    from megatron_run.resolve import ResolvedRun


def parameters_by_stage(run: ResolvedRun) -> tuple[int, ...]:
    """Parameters that each rank of a stage holds, padding left out; chunks are built on the meta device.

    A tied embedding counts on every stage that holds a copy of it. Raises what building the model raises.
    """
    options = with_vocabulary(run, run.one("data").create())
    meta, counts = torch.device("meta"), []
    for stage in range(run.sizes.pipeline):
        topology = Topology(run.sizes, stage * (run.sizes.world // run.sizes.pipeline))
        context = make_context(run, topology, Groups(), meta, options)
        _, _, chunks = build_chunks(run, context)
        held = {parameter: info for chunk in chunks for parameter, info in describe_parameters(chunk).items()}
        counts.append(sum(_values(parameter, info) for parameter, info in held.items()))
    return tuple(counts)


def _values(parameter: Parameter, info: ParamInfo) -> int:
    """The values of ``parameter`` that belong to a logical tensor."""
    per_row = parameter.numel() // parameter.shape[0]
    return sum(len(part.local) * per_row for part in info.parts)
