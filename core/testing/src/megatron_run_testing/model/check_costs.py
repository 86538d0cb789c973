"""Compares the costs that a model's options tell with the layers that are built."""

from __future__ import annotations

from collections.abc import Iterable
from math import isclose, prod
from typing import TYPE_CHECKING

from megatron_run.contracts import ModelOptions
from megatron_run_testing import CheckFailed

if TYPE_CHECKING:
    from pydantic import BaseModel

    from megatron_run.contracts import Model, ParamInfo

#: Share of the matrices that costs may leave out: small tables, as of position biases.
_SMALL_TABLES = 0.05


def check_costs(options: BaseModel, built: Iterable[ParamInfo], model: type[Model]) -> None:
    """Raise :class:`CheckFailed` unless weights are those of the matrices ``built``, and FLOPs grow with a sample.

    Where the values of biases and norms are told, the sum is that of all that is built. A plan splits samples where
    costs say that pieces are computed, and a run where the class ``model`` does.
    """
    assert isinstance(options, ModelOptions), "planning refuses others"
    costs, longer = (options.costs(length, options.vocab_size or 0) for length in (16, 32))
    shapes = [part.shape for info in built if info.counted for part in info.parts]
    matrices = sum(prod(shape) for shape in shapes if len(shape) > 1)
    if not isclose(costs.weights, matrices, rel_tol=_SMALL_TABLES):
        raise CheckFailed(f"costs tell {costs.weights:,.0f} weights, and the matrices built have {matrices:,}")
    if costs.vectors and costs.parameters != sum(map(prod, shapes)):
        raise CheckFailed(
            f"costs tell {costs.parameters:,.0f} parameters, and those built are {sum(map(prod, shapes)):,}"
        )
    if costs.computes_pieces != (own := vars(model).get("computes_pieces", False)):
        raise CheckFailed(
            f"costs tell computes_pieces={costs.computes_pieces}, and {model.__name__} itself says {own}: a plan would "
            "split other samples than a run"
        )
    if not 0 < 16 * costs.flops_per_token < 32 * longer.flops_per_token:
        raise CheckFailed(
            f"flops_per_token is {costs.flops_per_token} at 16 tokens, {longer.flops_per_token} at 32: a longer sample "
            "takes more"
        )
