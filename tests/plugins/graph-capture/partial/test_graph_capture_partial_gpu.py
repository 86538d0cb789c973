"""CUDA graphs of ``graph-capture=partial`` on a GPU: captured steps are eager ones."""

from __future__ import annotations

import pytest
import torch

from megatron_run.contracts import Microbatch, Segment
from megatron_run.contracts.schedule import Action
from megatron_run_graph_capture_partial import megatron_run_create_graph_capture
from megatron_run_graph_capture_partial.capture import PartialOptions
from megatron_run_testing.build_contexts import single_process_context
from megatron_run_testing.graph_capture import graph_capture_checks
from tests.contracts.conformance import failures
from tests.plugins.graph_bench import whole_tensor_layers

pytestmark = pytest.mark.gpu

CUDA = "cuda:0"

WHOLE = ("embedding", "attn", "mlp", "head", "loss")


@pytest.mark.parametrize("scope", [("attn",), ("attn", "mlp"), WHOLE])
@pytest.mark.parametrize("reuse", ["per_microbatch", "per_slot"])
def test_it_conforms_on_a_gpu(scope: tuple[str, ...], reuse: str) -> None:
    options = PartialOptions.model_validate({"scope": scope, "graph_reuse": reuse})
    checks = graph_capture_checks(lambda context: megatron_run_create_graph_capture(context, options), device=CUDA)
    assert failures(checks) == {}


def test_a_graph_draws_from_the_stream_that_ranks_share() -> None:
    """Its generator is not the default one: the graph must register it, and a replay draws what eager steps do."""
    context = single_process_context(dtype=torch.float32, device=CUDA)
    dropout = whole_tensor_layers(context).dropout(0.5)
    capture = megatron_run_create_graph_capture(context, PartialOptions())
    (region,) = capture.regions([[Segment("attn", 0, 0, dropout, ("x",), ("x",), (), draws=True)]])
    x = torch.ones(64, 64, device=CUDA, requires_grad=True)
    example = torch.empty_like(x, device="meta").requires_grad_()
    capture.capture([region], [Action("F", 0, 0), Action("B", 0, 0)], {region: (example,)})
    for step in (1, 2):
        context.rng.replicated.manual_seed(step)
        expected = dropout(x)
        context.rng.replicated.manual_seed(step)
        (found,) = capture.replay(region, Microbatch(0, step, 0, {}), x)
        assert torch.equal(found, expected)
        found.sum().backward()
    assert x.grad is not None
