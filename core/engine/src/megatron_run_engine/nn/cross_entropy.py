"""Cross entropy over a vocabulary that may be split over ranks.

Memory: the only tensors as large as the logits are the logits, kept for the backward, and their gradient. On a CPU
everything in fp32 is computed a few rows at a time, which fit into its caches. On a GPU two kernels (:mod:`.fused`)
read the logits once each, and where the loss alone reads them, the second writes the gradient over them. Without Triton
and in float64 a GPU computes all rows at once, in fp32 copies. :class:`LinearCrossEntropy` has the output layer within
and holds neither: it makes the logits of some tokens at a time, and in the backward again.

Legend: s sequence, b micro batch, N = s*b tokens, h hidden, v vocabulary, p padded vocabulary, t ranks that share it,
q = p/t columns of this rank, r <= q of them real, c rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run_engine.nn.device import is_fake, on_cpu
from megatron_run_engine.nn.fused import fuses, row_statistics, write_gradient
from megatron_run_engine.nn.linear import add_product
from megatron_run_engine.nn.parameter import owned
from megatron_run_engine.runtime.comm import ALONE
from megatron_run_engine.runtime.gradients import main_grad

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.nn import Parameter

    from megatron_run_engine.runtime.comm import ParallelGroup
    from megatron_run_engine.runtime.gradients import GradientAccumulator

#: Values processed at a time on a CPU: 1 MiB of fp32.
CACHED = 2**18
#: About how many slices a fake tensor is cut into.
_FAKE_SLICES = 16
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
    return _cross_entropy(logits, labels, vocab, label_smoothing, peers, False)


class CrossEntropy(nn.Module):
    """Loss per token over the unpadded vocabulary, split over ``peers``; labels are smoothed in training only.

    On a GPU the backward writes the gradient over logits that an operation made: nobody may read them afterwards.
    PyTorch refuses where autograd would, and a second backward is refused here. Logits that are a leaf stay.
    """

    def __init__(self, vocab: int, label_smoothing: float = 0.0, peers: ParallelGroup = ALONE) -> None:
        super().__init__()
        self.vocab, self.label_smoothing, self.peers = vocab, label_smoothing, peers

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits [s, b, q], labels [b, s] -> [s, b], at least fp32."""
        smoothing = self.label_smoothing if self.training else 0.0
        labels = labels.t().flatten()  # [b, s] -> [s*b]
        rows, reuses = logits.flatten(0, 1), not (logits if logits._base is None else logits._base).is_leaf
        return _cross_entropy(rows, labels, self.vocab, smoothing, self.peers, reuses).view(logits.shape[:2])


class LinearCrossEntropy(nn.Module):
    """Output layer and :class:`CrossEntropy` in one, which makes the logits of 1/``chunks`` of the tokens at a time.

    ``enter`` enters the region that ``peers`` share: [s, b, h] or a rank's part of it -> [s, b, h].
    """

    def __init__(
        self,
        gradients: GradientAccumulator,
        vocab: int,
        label_smoothing: float,
        chunks: int,
        peers: ParallelGroup = ALONE,
        enter: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        super().__init__()
        self.gradients, self.vocab, self.label_smoothing = gradients, vocab, label_smoothing
        self.chunks, self.peers, self.enter = chunks, peers, enter

    def forward(self, x: Tensor, weight: Parameter, labels: Tensor) -> Tensor:
        """X [s, b, h] or [s/t, b, h], the output layer's weight [q, h], labels [b, s] -> [s, b], at least fp32."""
        smoothing = self.label_smoothing if self.training else 0.0
        x, labels = self.enter(x), labels.t()  # [s, b, h], [s, b]
        loss: Tensor = _LinearCrossEntropy.apply(x.flatten(0, 1), weight, labels.flatten(), self, smoothing)  # type: ignore[no-untyped-call]  # torch's
        return loss.view(labels.shape)


class _Statistics(NamedTuple):
    """The needs of a backward besides logits; each is [N].

    ``column`` of the label on this rank, if it is ``local``; the ``largest`` logit, and the ``total`` of
    ``exp(x - largest)``, both over all ranks. ``real`` counts this rank's columns that are classes.
    """

    column: Tensor
    local: Tensor
    largest: Tensor
    total: Tensor
    real: int


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits; the backward may write over them if it ``reuses`` their memory, and then runs only once."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab: int,
        smoothing: float,
        peers: ParallelGroup,
        reuses: bool,
    ) -> Tensor:
        loss, found = _losses([logits], logits.shape[1], labels, vocab, smoothing, peers)
        ctx.save_for_backward(logits, *found[:4])
        ctx.real, ctx.vocab, ctx.smoothing = found.real, vocab, smoothing
        ctx.reuses, ctx.spent = reuses and fuses(logits), False
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError(
                "the backward of a cross entropy ran twice: the first one wrote the gradient over the logits; "
                "compute the loss again, or call megatron_run_engine.nn.cross_entropy, which keeps them"
            )
        logits, column, local, largest, total = ctx.saved_tensors
        found = _Statistics(column, local, largest, total, ctx.real)
        ctx.spent, out = ctx.reuses, None
        if ctx.reuses:
            out = logits.detach()
            torch.autograd.graph.increment_version(out)  # so that autograd refuses whoever else has saved the logits
        result = _logits_gradient(logits, found, grads[0], ctx.vocab, ctx.smoothing, out)
        return result, *(None,) * 5


def _cross_entropy(*arguments: Any) -> Tensor:
    """:class:`_CrossEntropy` of its ``arguments``."""
    result: Tensor = _CrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves x and a few values per token.

    The backward makes each chunk's logits again: a third more products than with whole logits, since a product with
    ``weight`` takes part three times instead of twice besides the weight gradient. If the weight gradient is put off to
    W, its logits are made a third time there.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, labels: Tensor, head: LinearCrossEntropy, smoothing: float
    ) -> Tensor:
        pieces = (F.linear(rows, weight) for rows in x.chunk(head.chunks))
        loss, found = _losses(pieces, len(weight), labels, head.vocab, smoothing, head.peers)
        ctx.save_for_backward(x, *found[:4])
        ctx.weight, ctx.head = weight, head  # the parameter itself, which has main_grad: see linear.py
        ctx.real, ctx.smoothing = found.real, smoothing
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x, *found = ctx.saved_tensors
        weight, head, trains = ctx.weight, ctx.head, ctx.weight.requires_grad
        result = torch.empty_like(x) if ctx.needs_input_grad[0] else None

        def pass_over(of_x: Tensor | None, of_weight: Tensor | None) -> None:
            """Write the gradient of x, and add that of the weight, chunk by chunk."""
            start = 0
            for rows, grad, column, local, largest, total in zip(
                *(each.chunk(head.chunks) for each in (x, grads[0], *found)), strict=True
            ):
                logits = F.linear(rows, weight)  # [c, q]
                of_rows = _Statistics(column, local, largest, total, ctx.real)
                _logits_gradient(logits, of_rows, grad, head.vocab, ctx.smoothing, out=logits)
                if of_x is not None:
                    torch.mm(logits, weight, out=of_x[start : start + len(rows)])
                if of_weight is not None:
                    add_product(of_weight, logits.t(), rows)
                start += len(rows)

        if trains and not head.gradients.defers:  # one pass for both gradients
            head.gradients.submit((weight,), lambda: pass_over(result, main_grad(weight)))
        else:
            if result is not None:
                pass_over(result, None)
            if trains:
                head.gradients.submit((weight,), lambda: pass_over(None, main_grad(weight)), reads=True)
        return result, None, None, None, None


def _losses(
    pieces: Iterable[Tensor], columns: int, labels: Tensor, vocab: int, smoothing: float, peers: ParallelGroup
) -> tuple[Tensor, _Statistics]:
    """Losses [N] of the logits in ``pieces``, each [c, q]; ``columns`` is q. No piece is kept."""
    first = peers.index * columns
    real = min(columns, max(vocab - first, 0))
    column, local = owned(labels, first, real, vocab)
    sums, start = list[tuple[Tensor, ...]](), 0
    for piece in pieces:
        sums.append(_row_statistics(piece, column[start : start + len(piece)], real, spreads=smoothing > 0))
        start += len(piece)
    top, total, target, *spread = (torch.cat(each) for each in zip(*sums, strict=True))  # each [N], of this rank alone
    # Logits enter the exponential as differences to the largest of all ranks: exp cannot overflow.
    largest = peers.max_(top.clone())  # a copy, since max_ works in place and `top` is read below
    # A rank that holds padding only has no maximum to rescale from.
    lower = top - largest if real else torch.zeros_like(top)
    target = torch.where(local, target - largest, 0.0)
    shares = [total * lower.exp(), target, *(each + lower * real for each in spread)]
    total, target, *spread = peers.sum_(torch.stack(shares))  # one collective for all sums
    likely = (1 - smoothing) * target + smoothing * spread[0] / vocab if smoothing else target
    return total.log() - likely, _Statistics(column, local, largest, total, real)


def _logits_gradient(
    logits: Tensor, found: _Statistics, grad: Tensor, vocab: int, smoothing: float, out: Tensor | None = None
) -> Tensor:
    """``(softmax - (1 - e) * one_hot(label) - e / v) * grad`` of logits [N, q], rounded once to their type.

    ``out`` may be the logits themselves.
    """
    column, local, largest, total, columns = found
    result = torch.empty_like(logits) if out is None else out
    if fuses(logits):
        of_rows, weights = (largest, total, grad.contiguous()), (columns, 1 - smoothing, smoothing / vocab)
        write_gradient(logits, result, (column, local), of_rows, weights)
        return result
    real, scale, smooth = logits[:, :columns], grad / total, smoothing / vocab * grad
    if columns:
        # The label's column is computed in fp32: subtracting one_hot from the rounded softmax would round twice.
        likely = torch.where(local, grad * (1 - smoothing), 0.0)
        at_label = _exp_(_logit_at(real, column) - largest) * scale - smooth - likely  # [N]
    result[:, columns:].zero_()
    for rows in _row_blocks(logits):
        part = _exp_(_widened(real[rows]) - largest[rows, None]).mul_(scale[rows, None])  # [c, r]
        result[rows, :columns] = part.sub_(smooth[rows, None]) if smoothing else part
    if columns:
        result[torch.arange(len(column), device=column.device), column] = at_label.to(result.dtype)
    return result


def _row_statistics(logits: Tensor, column: Tensor, columns: int, *, spreads: bool) -> tuple[Tensor, ...]:
    """The statistics of :func:`.fused.row_statistics` of logits [c, q], of which ``columns`` are real; each is [c]."""
    if fuses(logits):
        return row_statistics(logits, column, columns, spreads=spreads).unbind()
    real = logits[:, :columns]
    parts = [_row_sums(real[rows], spreads=spreads) for rows in _row_blocks(logits)]
    top, total, *spread = (torch.cat(each) for each in zip(*parts, strict=True))
    return top, total, _logit_at(real, column), *spread


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


def _logit_at(real: Tensor, column: Tensor) -> Tensor:
    """Each row's value at ``column``: [N, r], [N] -> [N], at least fp32; zeros on a rank without columns."""
    if not real.shape[1]:
        return _widened(real.new_zeros(len(real)))
    return _widened(real.gather(1, column[:, None]).squeeze(1))


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    """Slices that cover all rows: on a CPU as many rows each as its caches hold in fp32, elsewhere one slice.

    A fake tensor, of which a dry run counts the memory, is cut into few slices: each operation on one costs as much as
    on a real one, and a thousand of them were most of a dry run. What a slice needs besides is then still little.
    """
    count, columns = logits.shape
    step = max(1, CACHED // columns) if on_cpu(logits) else max(1, count)
    if is_fake(logits):
        step = max(step, count // _FAKE_SLICES)
    return (slice(start, start + step) for start in range(0, max(1, count), step))
