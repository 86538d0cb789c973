"""A layer that says nothing of its parameters is refused where it is built, and by its conformance suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_run.contracts import (
    AttentionShape,
    Init,
    LinearPart,
    LinearSpec,
    ParallelLayers,
    ParameterSpec,
    Pieces,
    StackedLayers,
)
from megatron_run.errors import ExitCode, PluginError
from megatron_run.planning import load_config
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.parameter_init import unspecified
from megatron_run_engine.training.checked_plugins import CheckedLayers
from megatron_run_testing import CheckFailed
from megatron_run_testing.build_contexts import single_process_context
from megatron_run_testing.parallel_layer import parallel_layer_checks

PLUGIN = """
from torch import nn

from megatron_run.contracts import PluginInfo, StackedLayers
from megatron_run.hookspecs import hookimpl


class Bare(StackedLayers):
    def norm(self, kind, size, eps=1e-5):
        return nn.RMSNorm(size, eps)


@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("parallel-layer", "bare")


@hookimpl
def megatron_run_create_parallel_layer(base):
    return Bare(base)
"""
INIT, PARTS = Init("normal", 0.02), (LinearPart("up", 8),)
#: Every method that makes a layer, and what it is given.
MAKERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "column_linear": ((LinearSpec(4, PARTS, INIT, bias=True),), {}),
    "row_linear": ((LinearSpec(8, 4, INIT, bias=True),), {}),
    "vocab_embedding": ((16, 4), {"init": INIT}),
    "output_layer": ((16, 4), {"init": INIT}),
    "norm": (("layernorm", 4), {}),
    "dropout": ((0.1,), {}),
    "core_attention": ((AttentionShape(2, 2, 2, 0), 0.1), {}),
    "cross_entropy": ((16,), {}),
    "expert_column_linear": ((range(2), LinearSpec(4, PARTS, INIT, bias=True)), {}),
    "expert_row_linear": ((range(2), LinearSpec(8, 4, INIT, bias=True)), {}),
}


def test_a_run_with_such_a_layer_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "bare.py"
    file.write_text(PLUGIN, encoding="utf-8")
    run = load_config("preset:tiny", plugins=[f"parallel-layer=dense+{file}"])
    with pytest.raises(PluginError) as refused:
        model_size(run)
    assert str(refused.value) == (
        "norm of parallel-layer=dense+bare returned RMSNorm, which does not say what weight is: parameter_specs, a "
        "dict on the module that owns a parameter, say how it starts, and over which ranks its gradient is a part of a "
        'sum; set self.parameter_specs = {"weight": ParameterSpec(Init(...))} there'
    )
    assert refused.value.exit_code == ExitCode.PLUGIN


def test_every_method_that_makes_a_layer_is_checked() -> None:
    assert MAKERS.keys() == ParallelLayers.__abstractmethods__ - {"enter_region", "leave_region"}
    context = single_process_context()
    for name, (arguments, options) in MAKERS.items():
        dense = DenseLayers(context)
        made = getattr(CheckedLayers(dense, "mine", Pieces()), name)(*arguments, **options)
        assert isinstance(made, nn.Module)
        setattr(dense, name, lambda *_, **__: nn.Sequential(nn.LayerNorm(4)))
        with pytest.raises(PluginError, match=f"^{name} of mine returned Sequential, .* what 0.weight is: "):
            getattr(CheckedLayers(dense, "mine", Pieces()), name)(*arguments, **options)


class Bare(StackedLayers):
    """Without a word about its norms."""

    def norm(self, kind: str, size: int, eps: float = 1e-5) -> nn.Module:
        return nn.RMSNorm(size, eps, dtype=torch.float64)


def make(context: BuildContext) -> ParallelLayers:
    return Bare(DenseLayers(context))


def test_the_suite_says_it_too() -> None:
    (check,) = (check for check in parallel_layer_checks(make) if check.name == "root-mean-square norm")
    with pytest.raises(CheckFailed, match="weight has no parameter_specs entry"):
        check.run()


def test_the_first_owner_of_a_parameter_speaks_of_it() -> None:
    """As around a layer of a library, which owns the parameters as well."""

    class Around(nn.Module):
        def __init__(self, *known: str) -> None:
            super().__init__()
            self.inner = nn.LayerNorm(4)
            self.weight, self.bias = self.inner.weight, self.inner.bias
            self.parameter_specs = dict.fromkeys(known, ParameterSpec(Init("ones")))

    assert not unspecified(Around("weight", "bias"))
    assert unspecified(Around("weight")) == "bias"


def test_what_is_passed_on_works_as_before() -> None:
    layers = CheckedLayers(DenseLayers(single_process_context()), "mine", Pieces())
    x: Tensor = torch.ones(2, 1, 4)
    assert layers.enter_region(x) is x
    assert layers.leave_region(x) is x
