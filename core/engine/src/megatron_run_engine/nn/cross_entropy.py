"""Cross entropy over a vocabulary that may be split over ranks.

Memory: the only tensors as large as the logits are the logits, kept for the backward, and their gradient. Everything in
fp32 is computed a few rows at a time; on a CPU these rows fit into its caches.

Legend: s sequence, b micro batch, N = s*b tokens, v vocabulary, p padded vocabulary, t ranks that share it, q = p/t
columns of this rank, r <= q of them real, c rows at a time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_run_engine.nn.parameter import owned
from megatron_run_engine.runtime.comm import ALONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_run_engine.runtime.comm import ParallelGroup

#: Values processed at a time on a CPU: 1 MiB of fp32.
CACHED = 2**18
LOG2_E = 1 / math.log(2)


def cross_entropy(
    logits: Tensor, labels: Tensor, vocab: int, label_smoothing: float = 0.0, peers: ParallelGroup = ALONE
) -> Tensor:
    """Loss per token: logits [N, q], labels [N] -> [N], in nats and at least fp32; equal on all ``peers``.

    Rank i of ``peers`` holds columns ``i*q`` to ``(i+1)*q - 1`` of the padded vocabulary. Columns from ``vocab`` on are
    padding: they are not classes and get no gradient. Only a few scalars per token cross ranks: the maximum, and the
    sums that make up the loss (Shoeybi et al. 2019, section 3). ``label_smoothing`` e gives
    ``(1 - e) * nll + e * mean over v of -log p``. A label outside the vocabulary raises, as in :func:`owned`.
    """
    result: Tensor = _CrossEntropy.apply(logits, labels, vocab, label_smoothing, peers)  # type: ignore[no-untyped-call]  # torch's
    return result


class CrossEntropy(nn.Module):
    """Loss per token over the unpadded vocabulary, split over ``peers``; labels are smoothed in training only."""

    def __init__(self, vocab: int, label_smoothing: float = 0.0, peers: ParallelGroup = ALONE) -> None:
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
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab: int, smoothing: float, peers: ParallelGroup) -> Tensor:
        first = peers.index * logits.shape[1]
        real = logits[:, : max(vocab - first, 0)]  # [N, r]
        column, mine = owned(labels, first, real.shape[1], vocab)
        sums = [_row_sums(real[rows], spreads=smoothing > 0) for rows in _row_blocks(logits)]
        top, total, *spread = (torch.cat(parts) for parts in zip(*sums, strict=True))  # each [N], of this rank alone
        # Logits enter the exponential as differences to the largest of all ranks: exp cannot overflow.
        largest = peers.max_(top.clone())  # a copy, since max_ works in place and `top` is read below
        # A rank that holds padding only has no maximum to rescale from.
        lower = top - largest if real.shape[1] else torch.zeros_like(top)
        target = torch.where(mine, _logit_at(real, column, largest), 0.0)
        shares = [total * lower.exp(), target, *(each + lower * real.shape[1] for each in spread)]
        total, target, *spread = peers.sum_(torch.stack(shares))  # one collective for all sums
        ctx.save_for_backward(logits, column, mine, largest, total)
        ctx.columns, ctx.vocab, ctx.smoothing = real.shape[1], vocab, smoothing
        likely = (1 - smoothing) * target + smoothing * spread[0] / vocab if smoothing else target
        loss: Tensor = total.log() - likely
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """``(softmax - (1 - e) * one_hot(label) - e / v) * grad``, each value rounded once to the logits' type."""
        (logits, column, mine, largest, total), (grad,) = ctx.saved_tensors, grads
        real, scale, smooth = logits[:, : ctx.columns], grad / total, ctx.smoothing / ctx.vocab * grad
        result = torch.empty_like(logits)
        result[:, ctx.columns :].zero_()
        for rows in _row_blocks(logits):
            part = _exp_(_widened(real[rows]) - largest[rows, None]).mul_(scale[rows, None])  # [c, r]
            result[rows, : ctx.columns] = part.sub_(smooth[rows, None]) if ctx.smoothing else part
        if ctx.columns:
            # The label's column is recomputed in fp32: subtracting one_hot from the rounded softmax would round twice.
            likely = torch.where(mine, grad * (1 - ctx.smoothing), 0.0)
            at_label = _exp_(_logit_at(real, column, largest)) * scale - smooth - likely  # [N]
            result[torch.arange(len(column), device=column.device), column] = at_label.to(result.dtype)
        return result, None, None, None, None


def _row_sums(real: Tensor, *, spreads: bool) -> tuple[Tensor, ...]:
    """Row statistics of [c, r]: the maximum, ``sum(exp(x - max))`` and, with ``spreads``, ``sum(x - max)``; each [c].

    The most negative finite number stands for the maximum of a row that is all -inf or has no columns.
    """
    exact = _widened(real)
    least = torch.finfo(exact.dtype).min
    top = exact.amax(1).clamp_(min=least) if real.shape[1] else exact.new_full((len(real),), least)
    shifted = exact - top[:, None]
    spread = (shifted.sum(1),) if spreads else ()
    return top, _exp_(shifted).sum(1), *spread


def _exp_(x: Tensor) -> Tensor:
    """``exp`` in place, as a power of two.

    On a CPU ``torch.exp`` calls MKL, which is slow on processors that are not Intel's; ``exp2`` is PyTorch's own
    vectorised loop. The error is at most ``|x|`` roundings.
    """
    return x.mul_(LOG2_E).exp2_()


def _widened(x: Tensor) -> Tensor:
    """X in fp32, or float64 if it has that type."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _logit_at(real: Tensor, column: Tensor, largest: Tensor) -> Tensor:
    """Each row's value at ``column`` minus ``largest``: [N, r], [N], [N] -> [N]; zeros on a rank without columns."""
    if not real.shape[1]:
        return torch.zeros_like(largest)
    return _widened(real.gather(1, column[:, None]).squeeze(1)) - largest


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    """Slices that cover all rows: on a CPU as many rows each as its caches hold in fp32, elsewhere one slice."""
    count, columns = logits.shape
    step = max(1, CACHED // columns) if logits.device.type == "cpu" else max(1, count)
    return (slice(start, start + step) for start in range(0, max(1, count), step))
