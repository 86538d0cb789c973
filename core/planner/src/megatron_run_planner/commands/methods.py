"""The methods by which the tokens of split samples meet, side by side for one split: why one of them is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_run.contracts.costs import ModelCosts
from megatron_run_planner.devices import Device
from megatron_run_planner.layer_time import mean_layer
from megatron_run_planner.memory import least_memory
from megatron_run_planner.split_samples import METHODS, sent, why_not
from megatron_run_planner.workload import ContextMethod, ModelSplit


@dataclass(frozen=True)
class Method:
    """A method: ``seconds`` of a layer on average and the bytes that a rank sends for it, forward and backward.

    ``needed`` are bytes of device memory without which no schedule runs. ``refused`` says why the model cannot be split
    so, empty where it can.
    """

    name: ContextMethod
    seconds: float
    sent: float
    needed: float
    refused: str = ""


def compare(model: ModelCosts, split: ModelSplit, device: Device) -> list[Method]:
    """Every method, that of ``split`` first and the others by time; none where no sample is split."""
    if split.context == 1:
        return []
    found = [_method(model, replace(split, method=name), device) for name in METHODS]
    return sorted(found, key=lambda each: (each.name != split.method, bool(each.refused), each.seconds))


def _method(model: ModelCosts, split: ModelSplit, device: Device) -> Method:
    layer = mean_layer(model, split, device)
    traffic = model.kinds.mean(lambda each: sum(sent(each, split, device.width)))
    needed = least_memory(model, split).needed()
    return Method(split.method, layer.forward + layer.backward, traffic, needed, why_not(model, split))
