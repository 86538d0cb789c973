"""How a layer is split, and the edges of its region: conjugate pairs of autograd functions, the product at its entry.

:class:`LayerSplit` says over which ranks, along the sequence or not, and which piece of each matrix a rank holds.

``f`` and ``g`` are those of Shoeybi et al. 2019 ("Megatron-LM"), section 3. Under sequence parallelism
``gather_sequence`` and ``scatter_sequence`` replace them (Korthikanti et al. 2022, "Reducing Activation Recomputation
in Large Transformer Models", section 4.2). An all-reduce equals a reduce-scatter plus an all-gather, so both pairs move
the same bytes. In ``column_linear`` entry and product are one autograd function, whose backward overlaps the two.

| | forward | backward |
|---|---|---|
| ``f`` | nothing | all-reduce |
| ``g`` | all-reduce | nothing |
| ``gather_sequence`` | all-gather | reduce-scatter |
| ``scatter_sequence`` | reduce-scatter | all-gather |

Legend: s sequence, b micro batch, i inputs, o outputs, t tensor-parallel size; x is [s, b, *] inside the region and
[s/t, b, *] outside under sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_run.contracts import Part
from megatron_run.contracts.parallel_layer import even_part
from megatron_run_engine.nn.gelu import activated, shared_terms
from megatron_run_engine.nn.linear import PLAIN, Products, input_gradient, linear, submit_gradients
from megatron_run_engine.runtime.comm import ParallelGroup

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import LinearPart, ParameterSpec
    from megatron_run.contracts.topology import Axis
    from megatron_run_engine.nn.gelu import Activation, Terms
    from megatron_run_engine.runtime.gradients import GradientAccumulator


@dataclass(frozen=True)
class LayerSplit:
    """A split of a layer over ``peers``, the ranks along ``axis``.

    ``sequence``: between layers each rank holds its part of the sequence instead of all of it (sequence parallelism).
    ``overlap``: collectives of the backward run while gradients are computed.
    """

    peers: ParallelGroup
    sequence: bool = False
    overlap: bool = True
    axis: Axis = "tensor"

    def part(self, size: int, what: str) -> int:
        """``size`` over the number of ranks. Raises as :func:`even_part`."""
        return even_part(size, self.peers.size, what, self.axis)

    def features(self, parts: tuple[LinearPart, ...]) -> int:
        """This rank's output features, summed over ``parts``. Raises as :meth:`part`."""
        return sum(self._rows(parts))

    def rows_of(self, name: str, parts: tuple[LinearPart, ...], columns: tuple[int, ...] = ()) -> tuple[Part, ...]:
        """Parts of a parameter that stacks this rank's rows of the logical tensors ``<part>.<name>``."""
        rows = self._rows(parts)
        return tuple(
            Part(
                f"{part.name}.{name}",
                (part.features, *columns),
                range(stop - count, stop),
                start=self.peers.index * count,
            )
            for part, count, stop in zip(parts, rows, accumulate(rows), strict=True)
        )

    def columns_of(self, name: str, inputs: int, outputs: int) -> tuple[Part, ...]:
        """The part of a parameter that holds this rank's columns of the logical matrix ``name`` [outputs, inputs]."""
        column = self.peers.index * self.part(inputs, "input features")
        return (Part(name, (outputs, inputs), range(outputs), column=column),)

    def whole(self, spec: ParameterSpec) -> ParameterSpec:
        """``spec`` of a replicated parameter that acts outside the region, such as a norm's.

        Under sequence parallelism each rank sees s/t tokens there, so its gradient is one term of a sum over the axis.
        """
        return replace(spec, partial_over=self.axis) if self.sequence else spec

    def _rows(self, parts: tuple[LinearPart, ...]) -> list[int]:
        return [self.part(part.features, str(part)) for part in parts]


def f(x: Tensor, peers: ParallelGroup) -> Tensor:
    """Enter the region: all peers hold the same x [*]; the backward sums their gradients."""
    result: Tensor = _F.apply(x, peers)  # type: ignore[no-untyped-call]  # torch's
    return result


def g(x: Tensor, peers: ParallelGroup) -> Tensor:
    """Leave the region: sum the peers' partial results x [*], in place."""
    result: Tensor = _G.apply(x, peers)  # type: ignore[no-untyped-call]  # torch's
    return result


def gather_sequence(x: Tensor, peers: ParallelGroup) -> Tensor:
    """Enter the region with the whole sequence: [s/t, *] -> [s, *]."""
    result: Tensor = _GatherSequence.apply(x, peers)  # type: ignore[no-untyped-call]  # torch's
    return result


def scatter_sequence(x: Tensor, peers: ParallelGroup) -> Tensor:
    """Leave the region with this rank's part of the sequence, summed over the peers: [s, *] -> [s/t, *]."""
    result: Tensor = _ScatterSequence.apply(x, peers)  # type: ignore[no-untyped-call]  # torch's
    return result


class _F(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: ParallelGroup) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd forbids changing grads[0] in place, and it may be an expanded or shared tensor.
        return ctx.peers.sum_(grads[0].clone(memory_format=torch.contiguous_format)), None


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: ParallelGroup) -> Tensor:
        ctx.mark_dirty(x)
        return peers.sum_(x)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None  # all peers hold the same gradient, that of the summed result


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: ParallelGroup) -> Tensor:
        ctx.peers = peers
        return peers.gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.scatter_sum(grads[0]), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: ParallelGroup) -> Tensor:
        ctx.peers = peers
        return peers.scatter_sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.gather(grads[0]), None


def column_linear(
    x: Tensor,
    weight: Parameter,
    bias: Parameter | None,
    gradients: GradientAccumulator,
    split: LayerSplit,
    products: Products = PLAIN,
    activation: Activation | None = None,
) -> Tensor:
    """Enter the region and multiply: x [s, b, i] or [s/t, b, i], weight [o/t, i], bias [o/t] -> [s, b, o/t].

    An ``activation`` follows, as in :func:`.linear`.
    """
    if not (split.overlap and torch.is_grad_enabled()):
        enter = gather_sequence if split.sequence else f
        return linear(enter(x, split.peers), weight, bias, gradients, products, activation)
    terms = shared_terms(activation, x, bias)
    y: Tensor = _ColumnLinear.apply(x, weight, bias, gradients, split, products, terms)  # type: ignore[no-untyped-call]  # torch's
    return activated(y, activation, terms)


class _ColumnLinear(torch.autograd.Function):
    """``f`` (or ``gather_sequence``) and the product in one function, so that their backwards can overlap.

    The forward saves this rank's part of x only; under sequence parallelism the backward gathers all of x again. In a
    split backward that happens in ``I``, so all of x [s, b, i] is held from ``I`` to ``W``. Without sequence
    parallelism it is held from the forward on.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        gradients: GradientAccumulator,
        split: LayerSplit,
        products: Products,
        terms: Terms | None,
    ) -> Tensor:
        # The parameters themselves, which have main_grad: saved tensors may come back as copies (see linear.py).
        ctx.weight, ctx.bias, ctx.gradients, ctx.split, ctx.products = weight, bias, gradients, split, products
        ctx.terms, trains = terms, weight.requires_grad
        if split.sequence or not trains:
            ctx.save_for_backward(*((x,) if trains else ()))
            return products.forward(split.peers.gather(x) if split.sequence else x, weight, bias)
        result, kept = products.forward_keeping(x, weight, bias)
        ctx.save_for_backward(*kept)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, *tuple[None, ...]]:
        """Overlap: x is gathered during the input gradient's product, that gradient is reduced during the weight's."""
        x, (grad,), peers, sequence = ctx.saved_tensors, grads, ctx.split.peers, ctx.split.sequence
        trains, summing = ctx.weight.requires_grad, None
        gathering = peers.start_gather(x[0]) if sequence and trains else None
        # [s, b, i]: this rank's term of the input gradient, which the collective below sums
        partial, kept = input_gradient(ctx.products, grad, ctx.weight, wanted=ctx.needs_input_grad[0])
        gathered = gathering.wait() if gathering else None
        if partial is not None:
            summing = peers.start_scatter_sum(partial) if sequence else peers.start_sum(partial)
        if trains:
            x = x if gathered is None else ctx.products.keep_input(gathered)
            submit_gradients(ctx.gradients, ctx.weight, ctx.bias, x, grad, kept, ctx.products, ctx.terms)
        return (summing.wait() if summing else None), *(None,) * 6
