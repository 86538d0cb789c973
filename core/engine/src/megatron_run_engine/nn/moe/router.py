"""The router: each token's experts and their weights, and the auxiliary losses. All of it in at least fp32.

Shazeer et al. 2017, "Outrageously Large Neural Networks"; Fedus et al. 2021, "Switch Transformers"; Zoph et al. 2022,
"ST-MoE"; Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing" (biases); DeepSeek-AI 2024, "DeepSeek-V3" (sigmoid,
groups).

Legend: n tokens, h hidden, e experts, k experts of a token, g groups of experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_run.contracts import Init, ParameterSpec
from megatron_run_engine.nn.linear import add_product
from megatron_run_engine.nn.parameter import build_device, empty_parameter
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
    """Logits of every token for every expert, and the biases that balance the experts.

    It runs inside a tensor-parallel region, where each rank propagates a part of the gradient: so its weight's gradient
    is partial over the tensor axis.

    ``expert_bias`` [e], None without a rate, is in the type of master weights: a step of the rate would vanish in 16
    bits. It is a parameter, so that it is saved, loaded, imported and exported like any other. Nothing differentiates
    it: optimizers see a gradient of zero, which moves nothing without weight decay, and :meth:`balance` moves it.
    """

    def __init__(self, context: BuildContext, spec: TransformerSpec, experts: ExpertSpec) -> None:
        super().__init__()
        self.gradients, self.dtype, self._rate = context.gradients, context.dtypes.main, experts.bias_rate
        self.weight = empty_parameter(context, experts.count, spec.hidden)
        split = context.topology.sizes.tensor > 1
        self.parameter_specs = {"weight": ParameterSpec(spec.init, partial_over="tensor" if split else None)}
        self.expert_bias: Parameter | None = None
        if experts.bias_rate:
            self.expert_bias = nn.Parameter(torch.empty(experts.count, dtype=self.dtype, device=build_device(context)))
            self.parameter_specs["expert_bias"] = ParameterSpec(Init("zeros"), decay=False, moved=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, h] -> [n, e] in the type of the master weights, whatever the type of the tokens."""
        logits: Tensor = _Logits.apply(  # type: ignore[no-untyped-call]  # torch's
            tokens, self.weight, self.dtype, self.gradients
        )
        return logits

    def balance(self, load: Tensor) -> None:
        """Move each bias by the rate, up for an expert with less than the mean of ``load`` [e] and down for more.

        Wang et al. 2024, algorithm 1. ``load`` are a whole step's choices, those of all data-parallel ranks.
        """
        assert self.expert_bias is not None, "the rate is above 0"
        with torch.no_grad():
            self.expert_bias.add_((load.mean(dtype=self.dtype) - load).sign(), alpha=self._rate)


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


def choose(logits: Tensor, spec: ExpertSpec, bias: Tensor | None = None) -> Routing:
    """The ``top_k`` experts of each token, from its logits [n, e].

    ``softmax`` normalises over the chosen experts, as Mixtral does, which equals probabilities among all divided by
    their sum; with ``pre_softmax`` over all experts, as Switch does. ``sigmoid`` uses the scores, divided by their sum
    if several experts are chosen and ``normalised`` is set, as DeepSeek-V3 does. ``bias`` [e] and groups decide which
    experts are chosen and change no weight.
    """
    chosen = _chosen(logits, spec, bias)
    if spec.scores == "sigmoid":
        scores = logits.sigmoid()
        weights = scores.gather(-1, chosen)
        if spec.top_k > 1 and spec.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
    else:
        scores = logits.softmax(-1)
        weights = (scores if spec.pre_softmax else logits).gather(-1, chosen)
        if not spec.pre_softmax:
            weights = weights.softmax(-1)
    return Routing(weights * spec.scaling if spec.scaling != 1 else weights, chosen, scores)


def _chosen(logits: Tensor, spec: ExpertSpec, bias: Tensor | None) -> Tensor:
    """The indices [n, k] of the experts with the best scores, bias added, in the best groups; no gradient."""
    if bias is None and spec.groups == 1:
        return logits.topk(spec.top_k, dim=-1).indices  # the order of the scores, before any of them underflows
    with torch.no_grad():
        ranked = logits.sigmoid() if spec.scores == "sigmoid" else logits.softmax(-1)
        ranked = ranked if bias is None else ranked + bias
        return _within_best_groups(ranked, spec).topk(spec.top_k, dim=-1).indices


def _within_best_groups(ranked: Tensor, spec: ExpertSpec) -> Tensor:
    """``ranked`` [n, e] where the expert is in one of the token's best groups, -inf elsewhere.

    DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2: a token then travels to few nodes.
    """
    if spec.groups == 1:
        return ranked
    grouped = ranked.view(len(ranked), spec.groups, -1)  # [n, g, e/g]
    worth = grouped.topk(spec.group_best, dim=-1).values.sum(-1)  # [n, g]
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, worth.topk(spec.top_groups, dim=-1).indices, True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)


def load_of(chosen: Tensor, experts: int) -> Tensor:
    """Number of tokens that chose each expert: [n, k] -> int64 [e]."""
    flat = chosen.flatten()  # not bincount, which synchronises with the host
    return flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))


def balance_loss(scores: Tensor, load: Tensor, choices: int) -> Tensor:
    """``e * sum_i f_i P_i``, which is 1 for a uniform load (Fedus et al. 2021, equation 4, for several choices).

    f_i is the share of all ``choices`` that fell on expert i, from ``load`` [e]; P_i is its mean score, from [n, e].
    """
    share, experts = load.to(scores.dtype) / choices, scores.shape[1]
    return experts * (share * scores.mean(0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """The mean square of ``log sum exp`` of a token's logits [n, e] (Zoph et al. 2022, equation 5)."""
    return logits.logsumexp(-1).square().mean()
