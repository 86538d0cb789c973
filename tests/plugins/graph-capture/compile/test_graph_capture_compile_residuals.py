"""A norm's gradient takes along what alone is added to it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from megatron_run_engine.nn.fused import norm_gradients
from megatron_run_graph_capture_compile.residuals import join_residuals

#: Sequence, micro batch and features.
S, B, H = 3, 2, 16
NORM = torch.ops.megatron_run_engine.norm_gradients.default

Results = Tensor | tuple[Tensor, ...]
#: Results of the norm's gradient of x [s, b, h], its terms for the weight, and another gradient of x.
Body = Callable[[Tensor, Tensor, Tensor], Results]


def joined(body: Body, before: Callable[[Tensor], Tensor] = torch.neg) -> tuple[list[fx.Node], list[fx.Node]]:
    """The norms and the additions that are left of ``body``'s graph; ``before`` makes its other gradient first."""

    def backward(x: Tensor, grad: Tensor, weight: Tensor, scale: Tensor, other: Tensor) -> Results:
        other, rows, slopes = before(other), x.flatten(0, 1), grad.flatten(0, 1)
        of_x, of_weight, _ = norm_gradients(slopes, rows, weight, None, scale)
        return body(of_x.view_as(x), of_weight, other)

    x, other = torch.zeros(S, B, H), torch.zeros(S, B, H)
    given = x, torch.zeros(S, B, H), torch.zeros(H), torch.zeros(S * B), other
    graph = make_fx(backward, tracing_mode="fake")(*given)
    join_residuals(graph)
    graph.graph.lint()
    additions = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    return graph.graph.find_nodes(op="call_function", target=NORM), additions


@pytest.mark.parametrize(
    "body",
    [lambda of_x, _, other: of_x + other, lambda of_x, _, other: other + of_x],
    ids=["before", "behind"],
)
def test_a_norm_takes_along_what_is_added(body: Body) -> None:
    (norm,), additions = joined(body)
    assert not additions
    beside = norm.args[5]
    assert isinstance(beside, fx.Node)
    assert beside.meta["val"].shape == (S * B, H)


def test_what_is_added_to_the_sum_stays_an_addition() -> None:
    (norm,), additions = joined(lambda of_x, _, other: of_x + other + other.exp())
    assert len(norm.args) == 6
    assert len(additions) == 1


@pytest.mark.parametrize(
    "body",
    [
        lambda of_x, _, other: (of_x + other, of_x),
        lambda of_x, _, other: torch.add(of_x, other, alpha=2),
        lambda of_x, of_weight, _: of_x + of_weight.sum(0).expand(S, B, H).contiguous(),
        lambda of_x, _, __: of_x + 1,
        lambda of_x, _, __: of_x + of_x,
        lambda of_x, _, __: of_x,
    ],
    ids=[
        "read twice",
        "scaled",
        "found later",
        "a number",
        "itself",
        "none",
    ],
)
def test_other_additions_stay(body: Body) -> None:
    (norm,), _ = joined(body)
    assert len(norm.args) == 5


@pytest.mark.parametrize(
    "before",
    [
        lambda other: other[:1],
        lambda other: other.double(),
        lambda other: other.transpose(0, 1).contiguous().transpose(0, 1),
    ],
    ids=["broadcast", "wider", "laid out otherwise"],
)
def test_what_is_unlike_the_gradient_is_added_to_it(before: Callable[[Tensor], Tensor]) -> None:
    (norm,), additions = joined(lambda of_x, _, other: of_x + other, before)
    assert len(norm.args) == 5
    assert len(additions) == 1
