"""The router: each token's experts and their weights, and the auxiliary losses. All of it in at least fp32.

Shazeer et al. 2017, "Outrageously Large Neural Networks"; Fedus et al. 2021, "Switch Transformers"; Zoph et al. 2022,
"ST-MoE"; DeepSeek-AI 2024, "DeepSeek-V3" (sigmoid).

Legend: n tokens, h hidden, e experts, k experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_run.contracts import ParameterSpec
from megatron_run_engine.nn.linear import add_product
from megatron_run_engine.nn.parameter import empty_parameter
from megatron_run_engine.runtime.gradients import main_grad

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run_engine.nn.spec import ExpertSpec, TransformerSpec
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_engine.runtime.gradients import GradientAccumulator

_TINY = 1e-20  # avoids 0 / 0 where the sigmoids of all chosen experts underflow to zero


class Routing(NamedTuple):
    """``weights`` and indices of the ``chosen`` experts [n, k]; ``scores`` of all experts [n, e], which sum to 1."""

    weights: Tensor
    chosen: Tensor
    scores: Tensor


class Router(nn.Module):
    """Logits of every token for every expert.

    It runs inside a tensor-parallel region, where each rank propagates a part of the gradient: so its weight's gradient
    is partial over the tensor axis.
    """

    def __init__(self, context: BuildContext, spec: TransformerSpec, experts: int) -> None:
        super().__init__()
        self.gradients, self.dtype = context.gradients, context.dtypes.main
        self.weight = empty_parameter(context, experts, spec.hidden)
        split = context.topology.sizes.tensor > 1
        self.parameter_specs = {"weight": ParameterSpec(spec.init, partial_over="tensor" if split else None)}

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, h] -> [n, e] in the type of the master weights, whatever the type of the tokens."""
        logits: Tensor = _Logits.apply(  # type: ignore[no-untyped-call]  # torch's
            tokens, self.weight, self.dtype, self.gradients
        )
        return logits


class _Logits(torch.autograd.Function):
    """A product in ``dtype`` of 16-bit operands; the weight gradient is accumulated without rounding to 16 bits."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Parameter, dtype: torch.dtype, gradients: GradientAccumulator
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.gradients = weight, gradients
        return tokens.to(dtype) @ weight.to(dtype).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (tokens,), (grad,), weight = ctx.saved_tensors, grads, ctx.weight
        if weight.requires_grad:

            def compute() -> None:
                add_product(main_grad(weight), grad.t(), tokens.to(grad.dtype))

            ctx.gradients.submit((weight,), compute)
        product = (grad @ weight.to(grad.dtype)).to(tokens.dtype) if ctx.needs_input_grad[0] else None
        return product, None, None, None


def choose(logits: Tensor, spec: ExpertSpec) -> Routing:
    """The ``top_k`` experts of each token, from its logits [n, e].

    ``softmax`` normalises over the chosen experts, as Mixtral does; with ``pre_softmax`` over all experts, as Switch
    does. ``sigmoid`` uses the scores, divided by their sum if several experts are chosen, as DeepSeek-V3 does.
    """
    if spec.scores == "sigmoid":
        scores = logits.sigmoid()
        weights, chosen = scores.topk(spec.top_k, dim=-1)
        if spec.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
    else:
        scores = logits.softmax(-1)
        best, chosen = (scores if spec.pre_softmax else logits).topk(spec.top_k, dim=-1)
        weights = best if spec.pre_softmax else best.softmax(-1)
    return Routing(weights * spec.scaling if spec.scaling != 1 else weights, chosen, scores)


def load_of(chosen: Tensor, experts: int) -> Tensor:
    """Number of tokens that chose each expert: [n, k] -> int64 [e]."""
    flat = chosen.flatten()  # not bincount, which synchronises with the host
    return flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))


def balance_loss(scores: Tensor, load: Tensor, top_k: int) -> Tensor:
    """``e * sum_i f_i P_i``, which is 1 for a uniform load (Fedus et al. 2021, equation 4, for several choices).

    f_i is the share of choices that fell on expert i, from ``load`` [e]; P_i is its mean score, from [n, e].
    """
    tokens, experts = scores.shape
    share = load.to(scores.dtype) / (tokens * top_k)
    return experts * (share * scores.mean(0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """The mean square of ``log sum exp`` of a token's logits [n, e] (Zoph et al. 2022, equation 5)."""
    return logits.logsumexp(-1).square().mean()
