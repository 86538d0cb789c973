"""The FP8 copies of weights: made once a step, and never older than the weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from megatron_run.config.request import Request
from megatron_run.contracts import Init, LinearSpec
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_parallel_layer_fp8 import weights as copies
from megatron_run_parallel_layer_fp8.quantized import Scaling, quantize, quantize_both, write_both
from megatron_run_parallel_layer_fp8.weights import StepWeight
from megatron_run_testing.build_contexts import single_process_context
from tests.support.training import Seen, train_here

E4M3 = torch.float8_e4m3fn
FP8 = "parallel-layer=dense+fp8"


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_step_has_copies_of_the_present_weight_and_nothing_else_has(scaling: Scaling) -> None:
    context = single_process_context(dtype=torch.bfloat16)
    layer = DenseLayers(context).row_linear(LinearSpec(32, 48, Init("zeros"), bias=False))
    weight, held = layer.get_parameter("weight"), StepWeight(context, layer, E4M3, scaling)

    def check() -> None:
        found = held.held()
        assert found is not None
        for copy, matrix in zip(found, (weight.detach(), weight.detach().t()), strict=True):
            expected = quantize(matrix, E4M3, scaling)
            assert torch.equal(copy.values.view(torch.uint8), expected.values.view(torch.uint8))
            assert torch.equal(copy.scale, expected.scale)

    weight.detach().normal_()
    held.make()
    assert held.held() is None, "no step has begun"
    places = set()
    for _ in range(3):
        context.gradients.start_step(1, lambda _: None)
        assert held.held() is None, "the copies are those of the step before"
        held.make()
        check()
        places.add(tuple(copy.values.data_ptr() for copy in held.held() or ()))
        layer.eval()
        assert held.held() is None, "an evaluation may see other weights"
        layer.train()
        weight.detach().normal_()  # as an update: through other tensors than the parameter
    assert len(places) == 1, "graphs would read what is no longer written"
    context.gradients.start_recorded_step()
    assert held.held() is None, "a recorded step would read the copies of another"


#: Name -> plugins and settings beside those of all runs.
WAYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "eager": ((), ()),
    "recomputed": ((), ("train.recompute=full",)),
    "recorded": (("graph-capture=partial,scope=attn,mlp",), ()),
    "whole step": (("graph-capture=partial,scope=step",), ()),
    "compiled": (("graph-capture=compile,scope=attn,mlp,backend=aot_eager",), ()),
}
STEPS, LAYERS = 4, 2
SETS = (
    f"train.steps={STEPS}",
    f"model.num_layers={LAYERS}",
    "model.dropout=0",
    "train.precision=bf16",
    "train.lr_shape=constant",
    "train.sequence_length=16",
    "train.micro_batch_size=2",
    "train.global_batch_size=6",
    "eval.interval=1",
    "run.threads=1",
)


def trained(name: str) -> Seen:
    plugins, sets = WAYS[name]
    return train_here(0, 1, Request(("preset:tiny",), sets=(*SETS, *sets), plugins=(FP8, *plugins)).to_json())


@pytest.fixture(scope="module")
def expected() -> Seen:
    """The run in which every product rounds its own weight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepWeight, "held", lambda _: None)
        return trained("eager")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in ("recomputed", "compiled"))) for name in WAYS]
)
def test_microbatches_share_what_a_step_makes_of_a_weight_and_learn_the_same(
    name: str, expected: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three microbatches a step, and an evaluation after each, which rounds the updated weights itself."""
    count = [0]

    def counted(make: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any) -> Any:
            count[0] += 1
            return make(*given)

        return counting

    for make in (quantize_both, write_both):
        monkeypatch.setattr(copies, make.__name__, counted(make))
    found = trained(name)
    assert (found.losses, found.validation) == (expected.losses, expected.validation)
    # A recorded step makes them when it is recorded, and in its replays without Python.
    times = 2 if name == "whole step" else STEPS
    assert count[0] == times * 4 * LAYERS
