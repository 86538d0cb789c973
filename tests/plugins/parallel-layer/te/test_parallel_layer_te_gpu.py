"""The real Transformer Engine on a GPU against the dense layers, at the precision of bf16."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron_run.contracts import Init, LinearPart, LinearSpec, ParallelLayers
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_parallel_layer_te import megatron_run_create_parallel_layer
from megatron_run_parallel_layer_te.precision import Options
from megatron_run_testing.build_contexts import single_process_context
from megatron_run_testing.parallel_layer import parallel_layer_checks
from tests.contracts.conformance import failures
from tests.plugins.optional_library import skip_without

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # the library has warnings of its own

CUDA = "cuda:0"

#: What a launcher asks; then whether the driver has a context of this process on the GPU, 1 or 0.
ASKING = """
import ctypes
from megatron_run_parallel_layer_te import Options, check_device
check_device("cuda:0", Options(fp8="current"))
driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
assert driver.cuInit(0) == 0
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
print(active.value)
"""


def layers(context: BuildContext, **options: Any) -> ParallelLayers:
    """The factory as a run makes it; the test is skipped where the library is missing."""
    skip_without("transformer_engine")
    made: ParallelLayers = megatron_run_create_parallel_layer(context, Options(**options))
    return made


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("delayed", [True, False])
def test_the_real_layers_conform(fused: bool, delayed: bool) -> None:
    options = {"fuse_weight_gradients": fused, "delay_weight_gradients": delayed}
    checks = parallel_layer_checks(
        lambda context: layers(context, **options), dtype=torch.bfloat16, device=CUDA, tolerance=5e-2
    )
    assert failures(checks) == {}


def test_a_launcher_that_has_asked_holds_no_context_on_the_gpu() -> None:
    skip_without("transformer_engine")
    done = subprocess.run([sys.executable, "-c", ASKING], check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.split()[-1] == "0"


@pytest.mark.parametrize("fp8", ["delayed", "current"])
def test_a_product_in_fp8_is_near_the_one_without(fp8: str) -> None:
    parts, init = (LinearPart("up", 64),), Init("normal", 0.1)
    context = single_process_context(dtype=torch.bfloat16, device=CUDA)
    made = layers(context, fp8=fp8, fuse_weight_gradients=False)
    layer: Any = made.column_linear(LinearSpec(64, parts, init, bias=False))
    x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(0)).to(CUDA, torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
        exact = torch.nn.functional.linear(x.double(), layer.weight.double())
        with made.forward_pass():
            found = layer(x)
    assert (found.double() - exact).norm() < 0.1 * exact.norm()  # E4M3 has three bits of mantissa
