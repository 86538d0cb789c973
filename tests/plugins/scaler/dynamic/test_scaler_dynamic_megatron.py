"""The same trajectories as megatron-core's scaler, which runs here on a CPU as it is."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks.support.megatron import TorchOnCpu, installed
from megatron_run_scaler_dynamic import DynamicScaler, Options
from tests.plugins.scaler.loss_scale import drawn_options, drawn_overflows

pytestmark = pytest.mark.skipif(not installed(), reason="needs megatron-core, which requirements-dev.txt has for Linux")


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The class of megatron-core, from its one file: its package needs much more."""
    core = find_spec("megatron.core")
    assert core is not None
    assert core.submodule_search_locations is not None
    file = Path(core.submodule_search_locations[0]) / "optimizer" / "grad_scaler.py"
    spec = spec_from_file_location("grad_scaler_of_megatron_core", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["torch"] = TorchOnCpu()
    return module.DynamicGradScaler


def odd_factors(random: Random) -> dict[str, Any]:
    """Options whose scales are no powers of two, so that every multiplication rounds."""
    options = drawn_options(random)
    factors = {"growth_factor": 1 + random.random(), "backoff_factor": random.uniform(0.1, 0.9)}
    return {**options, **factors, "initial_loss_scale": options["initial_loss_scale"] * random.uniform(1, 2)}


@pytest.mark.parametrize("draw", [drawn_options, odd_factors])
def test_a_hundred_random_sequences_are_megatron_cores(draw: Any, theirs: Any) -> None:
    for seed in range(100):
        random = Random(seed)
        options = draw(random)
        mine = DynamicScaler(Options(**options), torch.device("cpu"))
        reference = theirs(
            initial_scale=options["initial_loss_scale"],
            min_scale=options["min_loss_scale"],
            growth_factor=options["growth_factor"],
            backoff_factor=options["backoff_factor"],
            growth_interval=options["loss_scale_window"],
            hysteresis=options["hysteresis"],
        )
        for step, overflow in enumerate(drawn_overflows(random, 100)):
            mine.update(torch.tensor([float(overflow)]))
            reference.update(overflow)
            assert mine.state_dict() == {**reference.state_dict(), "scale": reference.scale.item()}, (seed, step)
            assert torch.equal(mine.inv_scale, reference.inv_scale)
