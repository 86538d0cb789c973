"""Cross entropy over a vocabulary that ranks may share: one copy of the logits, and one for their gradient.

Legend: s sequence, b micro batch, N = s*b tokens, v vocabulary, p padded vocabulary, t ranks that share it, q = p/t
columns of this rank, r <= q of them real.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_run.comm import Peers

#: One rank with the whole vocabulary.
ALONE = Peers()


def cross_entropy(
    logits: Tensor, labels: Tensor, vocab: int, label_smoothing: float = 0.0, peers: Peers = ALONE
) -> Tensor:
    """Loss per token: logits [N, q], labels [N] -> [N], in nats and at least fp32; equal on all ``peers``.

    Rank i of ``peers`` holds columns ``i*q`` to ``(i+1)*q - 1`` of the padded vocabulary. Columns from ``vocab`` on are
    padding: they are no class and get no gradient. Only scalars per token cross ranks: the maximum, and the sums that
    the loss is made of (Shoeybi et al. 2019, section 3). ``label_smoothing`` e gives
    ``(1 - e) * nll + e * mean over v of -log p``.
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
        # Differences to the largest logit neither overflow nor lose digits. [N]; a rank may hold padding only.
        largest = peers.max_(real.amax(1) if real.shape[1] else real.new_full((len(real),), -torch.inf))
        shifted = real - largest[:, None]
        column, mine = _column_of(labels, first, real.shape[1])
        target = shifted.gather(1, column[:, None]).squeeze(1) * mine if real.shape[1] else largest.new_zeros(len(real))
        spread = [shifted.sum(1)] if smoothing else []
        total, target, *spread = peers.sum_(torch.stack([shifted.exp_().sum(1), target, *spread]))  # each [N]
        ctx.save_for_backward(logits, labels, largest, total)
        ctx.vocab, ctx.first, ctx.smoothing = vocab, first, smoothing
        likely = (1 - smoothing) * target + smoothing * spread[0] / vocab if smoothing else target
        loss: Tensor = total.log() - likely
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """``(softmax - (1 - e) * one_hot(label) - e / v) * grad``, built in place in one buffer."""
        (logits, labels, largest, total), (grad,) = ctx.saved_tensors, grads
        real = _real(logits, ctx.vocab - ctx.first)
        padded = torch.empty(logits.shape, dtype=real.dtype, device=real.device)
        padded[:, real.shape[1] :] = 0
        result = padded[:, : real.shape[1]]
        torch.sub(real, largest[:, None], out=result).exp_().mul_((grad / total)[:, None])
        if ctx.smoothing:
            result -= (ctx.smoothing / ctx.vocab * grad)[:, None]
        if real.shape[1]:
            column, mine = _column_of(labels, ctx.first, real.shape[1])
            rows = torch.arange(len(labels), device=labels.device)
            result[rows, column] -= grad * mine * (1 - ctx.smoothing)  # deterministic, unlike scatter_add
        return padded.to(logits.dtype), None, None, None, None


def _real(logits: Tensor, vocab: int) -> Tensor:
    """The columns that are classes, in at least fp32: [N, q] -> [N, r]."""
    return logits[:, : max(vocab, 0)].to(torch.promote_types(logits.dtype, torch.float32))


def _column_of(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """This rank's column of each label, and whether it is this rank's at all: both [N]; any column where it is not."""
    column = labels - first
    return column.clamp(0, max(columns - 1, 0)), (column >= 0) & (column < columns)
