"""Transformer Engine as this plugin needs it; the meta device gets shapes alone. It is imported when a run starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_run_engine.runtime import Need, import_transformer_engine, installed_version
from megatron_run_parallel_layer_te import shapes

#: The oldest release with everything used here: ``autocast``, all four FP8 recipes and ``backward_dw``.
MINIMUM = "2.9"
NEED = Need(
    plugin="parallel-layer=te",
    distribution="megatron-run-parallel-layer-te",
    minimum=MINIMUM,
    reason=f"{MINIMUM} or newer is needed",
    instead="choose --plugin parallel-layer=tensor",
)


@dataclass(frozen=True)
class Engine:
    """The (untyped) modules ``transformer_engine.pytorch`` and ``transformer_engine.common.recipe``."""

    pytorch: Any
    recipe: Any
    version: str


def find_engine(device: torch.device) -> Engine:
    """Import Transformer Engine for a run on ``device``; the meta device gets :mod:`shapes`, without the library.

    Raises as :func:`import_transformer_engine`.
    """
    if device.type == "meta":
        return Engine(shapes, None, "of shapes alone")
    pytorch, recipe = import_transformer_engine(
        NEED, device, "transformer_engine.pytorch", "transformer_engine.common.recipe"
    )
    return Engine(pytorch, recipe, installed_version() or "of unknown version")
