"""GeLU (Hendrycks and Gimpel 2016), alone or after a linear layer whose bias it then brings the gradient of.

The gradient of such a bias is the column sums of the gradient that GeLU's backward writes. There, one kernel writes
that gradient and adds it up, instead of another pass over a tensor as wide as the feed-forward layer. The backward of
the layer comes next, and finds the sums in an object that the two share. They are two functions of autograd, since one
would hold what GeLU's backward reads until the layer's products are done.

Legend: * any leading dimensions, N their product, f features, u terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_run_engine.nn.fused import fused_gelu, fused_gelu_gradient, fuses

if TYPE_CHECKING:
    from torch.nn import Parameter

#: A function of a layer's result: [*, o] -> [*, o], or fewer features if it has a gate.
Activation = Callable[[Tensor], Tensor]


class Terms:
    """Rows whose sum is the gradient of a bias: the backward of GeLU leaves them for that of the layer before it."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def leave(self, rows: Tensor) -> None:
        """Keep ``rows`` [u, f] until they are taken."""
        self._rows = rows

    def take(self) -> Tensor:
        """The rows [u, f], which are not kept longer."""
        rows, self._rows = self._rows, None
        assert rows is not None, "GeLU's backward comes before that of the layer"
        return rows


class Gelu:
    """``x * cdf(x)`` of the standard normal distribution, or with ``tanh`` the approximation by that function."""

    def __init__(self, *, tanh: bool = False) -> None:
        self.tanh = tanh

    def __call__(self, x: Tensor) -> Tensor:
        """[*] -> [*], by PyTorch."""
        return F.gelu(x, approximate="tanh" if self.tanh else "none")

    def leaving(self, x: Tensor, terms: Terms) -> Tensor:
        """[*, f] -> [*, f], by a kernel, whose backward leaves ``terms``."""
        result: Tensor = _Gelu.apply(x, self.tanh, terms)  # type: ignore[no-untyped-call]  # torch's
        return result


def shared_terms(activation: Activation | None, x: Tensor, bias: Parameter | None) -> Terms | None:
    """The share of an ``activation`` in the layer before it, of input x: None unless it brings the bias's gradient."""
    if bias is None or not bias.requires_grad or not isinstance(activation, Gelu):
        return None
    return Terms() if torch.is_grad_enabled() and fuses(x) and x.dtype == bias.dtype else None


def activated(y: Tensor, activation: Activation | None, terms: Terms | None) -> Tensor:
    """``activation`` of a layer's result y, which leaves ``terms`` if there are any."""
    if terms is None:
        return y if activation is None else activation(y)
    assert isinstance(activation, Gelu)  # as shared_terms() has seen
    return activation.leaving(y, terms)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool, terms: Terms) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tanh, ctx.terms = tanh, terms
        return fused_gelu(x, tanh=tanh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        of_x, terms = fused_gelu_gradient(grads[0], *ctx.saved_tensors, tanh=ctx.tanh)
        ctx.terms.leave(terms)
        return of_x, None, None
