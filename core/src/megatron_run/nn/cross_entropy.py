"""Cross entropy over a vocabulary that ranks may share.

Of the logits' size nothing but the logits is kept for the backward. Forward and backward each work in one fp32 buffer
of that size, and on 16-bit logits in a second one, their copy in fp32.

Legend: s sequence, b micro batch, N = s*b tokens, v vocabulary, p padded vocabulary, t ranks that share it, q = p/t
columns of this rank, r <= q of them real.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_run.comm import ALONE
from megatron_run.nn.ownership import owned

if TYPE_CHECKING:
    from megatron_run.comm import Peers


def cross_entropy(
    logits: Tensor, labels: Tensor, vocab: int, label_smoothing: float = 0.0, peers: Peers = ALONE
) -> Tensor:
    """Loss per token: logits [N, q], labels [N] -> [N], in nats and at least fp32; equal on all ``peers``.

    Rank i of ``peers`` holds columns ``i*q`` to ``(i+1)*q - 1`` of the padded vocabulary. Columns from ``vocab`` on are
    padding: they are no class and get no gradient. Only scalars per token cross ranks: the maximum, and the sums that
    the loss is made of (Shoeybi et al. 2019, section 3). ``label_smoothing`` e gives
    ``(1 - e) * nll + e * mean over v of -log p``. A label that is no class is an error, as in :func:`owned`.
    """
    result: Tensor = _CrossEntropy.apply(logits, labels, vocab, label_smoothing, peers)  # type: ignore[no-untyped-call]  # torch's
    return result


class CrossEntropy(nn.Module):
    """Loss per token over the real vocabulary, which ``peers`` share, smoothed while training."""

    def __init__(self, vocab: int, label_smoothing: float = 0.0, peers: Peers = ALONE) -> None:
        super().__init__()
        self.vocab, self.label_smoothing, self.peers = vocab, label_smoothing, peers

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits [s, b, q], labels [b, s] -> [s, b], at least fp32."""
        smoothing = self.label_smoothing if self.training else 0.0
        labels = labels.t().flatten()  # [b, s] -> [s*b]
        loss = cross_entropy(logits.flatten(0, 1), labels, self.vocab, smoothing, self.peers)  # [s*b]
        return loss.view(logits.shape[:2])


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab: int, smoothing: float, peers: Peers) -> Tensor:
        first = peers.index * logits.shape[1]
        real = _real(logits, vocab - first)  # [N, r]
        column, mine = owned(labels, first, real.shape[1], vocab)
        # Differences to the largest logit neither overflow nor lose digits. [N]; a rank may hold padding only.
        largest = peers.max_(real.amax(1) if real.shape[1] else real.new_full((len(real),), -torch.inf))
        shifted = real - largest[:, None]
        found = shifted.gather(1, column[:, None]).squeeze(1) if real.shape[1] else largest
        target = torch.where(mine, found, 0.0)
        spread = [shifted.sum(1)] if smoothing else []
        total, target, *spread = peers.sum_(torch.stack([shifted.exp_().sum(1), target, *spread]))  # each [N]
        ctx.save_for_backward(logits, column, mine, largest, total)
        ctx.columns, ctx.vocab, ctx.smoothing = real.shape[1], vocab, smoothing
        likely = (1 - smoothing) * target + smoothing * spread[0] / vocab if smoothing else target
        loss: Tensor = total.log() - likely
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """``(softmax - (1 - e) * one_hot(label) - e / v) * grad``, built in place in one buffer."""
        (logits, column, mine, largest, total), (grad,) = ctx.saved_tensors, grads
        real = _real(logits, ctx.columns)
        padded = torch.empty(logits.shape, dtype=real.dtype, device=real.device)
        padded[:, ctx.columns :] = 0
        result = padded[:, : ctx.columns]
        torch.sub(real, largest[:, None], out=result).exp_().mul_((grad / total)[:, None])
        if ctx.smoothing:
            result -= (ctx.smoothing / ctx.vocab * grad)[:, None]
        if ctx.columns:
            rows = torch.arange(len(column), device=column.device)
            likely = torch.where(mine, grad * (1 - ctx.smoothing), 0.0)
            result[rows, column] -= likely  # deterministic, unlike scatter_add
        return padded.to(logits.dtype), None, None, None, None


def _real(logits: Tensor, classes: int) -> Tensor:
    """The columns that are classes, in at least fp32: [N, q] -> [N, r]."""
    return logits[:, : max(classes, 0)].to(torch.promote_types(logits.dtype, torch.float32))
