"""A column-parallel layer has named matrices: one that was given a number alone would have no rows on several ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_run.contracts import Init, LinearSpec, ParallelLayers
from megatron_run.errors import PluginError
from megatron_run_engine.builtin.model.gpt import GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.nn.parallel import LayerSplit
from megatron_run_engine.runtime.comm import ALONE
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_parallel_layer_tensor import TensorLayers
from megatron_run_testing.build_contexts import single_process_context

SPEC = LinearSpec(8, 16, Init("zeros"), bias=False)


def split(context: BuildContext) -> ParallelLayers:
    return TensorLayers(context, LayerSplit(ALONE))


@pytest.mark.parametrize("factory", [DenseLayers, split])
def test_columns_without_names_are_refused(
    factory: Callable[[BuildContext], ParallelLayers],
) -> None:
    layers = factory(single_process_context(GptOptions(num_layers=1, hidden_size=8, num_heads=2, vocab_size=16)))
    for make in (layers.column_linear, lambda spec: layers.expert_column_linear(range(2), spec)):
        with pytest.raises(PluginError, match=r"16 outputs has no named matrices.*LinearPart\('up', 16\)"):
            make(SPEC)
    assert layers.row_linear(SPEC) is not None
