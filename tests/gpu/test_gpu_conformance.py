"""The suite of each kind that touches a device, on that device, for every installed plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec

import pytest

from megatron_run.contracts import ParallelLayers
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.host.process import deterministic_kernels
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing import Check
from megatron_run_testing.build_contexts import on_device
from megatron_run_testing.conformance import checks_for
from megatron_run_testing.optimizer import optimizer_checks
from megatron_run_testing.parallel_layer import parallel_layer_checks
from tests.contracts.conformance import installed_plugins
from tests.gpu.runs import CPU, CUDA

#: What needs a library that may be missing.
LIBRARIES = {"te": "transformer_engine", "deepspeed": "deepspeed"}
#: Of these kinds one rank is checked: several are checked on the CPU, by tests/contracts.
ALONE: Mapping[str, Callable[[Plugin], tuple[Check, ...]]] = {
    "optimizer": lambda plugin: optimizer_checks(lambda context: plugin.create(context=context)),
    "parallel-layer": lambda plugin: parallel_layer_checks(_layers(plugin)),
}
#: The other kinds never see a device.
KINDS = ("scaler", "model", "graph-capture", *ALONE)
PLUGINS = {name: plugin for name, plugin in installed_plugins() if plugin.kind in KINDS}


def _layers(plugin: Plugin) -> Callable[[BuildContext], ParallelLayers]:
    def create(context: BuildContext) -> ParallelLayers:
        layers: ParallelLayers = plugin.create(context=context, base=DenseLayers(context))
        return layers

    return create


@pytest.mark.timeout(120)
@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("name", PLUGINS)
def test_an_installed_plugin_conforms(name: str, device: str) -> None:
    plugin = PLUGINS[name]
    library = LIBRARIES.get(plugin.name)
    if library is not None and find_spec(library) is None:
        pytest.skip(f"needs {library}")
    if library is not None and device == "cpu":
        pytest.skip(f"{library} is checked on a GPU")
    if str(plugin) == "parallel-layer=te":
        pytest.skip("its own test passes the types that the library has")
    place = device if device == "cpu" else "cuda:0"
    with on_device(place), deterministic_kernels(place):  # checks compare bits
        for check in ALONE.get(plugin.kind, checks_for)(plugin):
            check.run()
