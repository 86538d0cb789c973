"""Cross entropy that keeps one copy of the logits and makes one for their gradient, and knows padding columns.

Legend: N tokens, v vocabulary, p padded vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, vocab: int) -> Tensor:
    """Loss per token: logits [N, p], labels [N] -> [N], in nats and at least fp32.

    Columns from ``vocab`` on are padding: they are no class and get no gradient.
    """
    result: Tensor = _CrossEntropy.apply(logits, labels, vocab)  # type: ignore[no-untyped-call]  # torch's
    return result


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab: int) -> Tensor:
        real = _real(logits, vocab)
        largest = real.amax(1)  # [N]: differences to it neither overflow nor lose digits
        total = (real - largest[:, None]).exp_().sum(1)  # [N]
        ctx.save_for_backward(logits, labels, largest, total)
        ctx.vocab = vocab
        return total.log() - (real.gather(1, labels[:, None]).squeeze(1) - largest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """``(softmax - one_hot(label)) * grad``, built in place in one buffer."""
        (logits, labels, largest, total), (grad,) = ctx.saved_tensors, grads
        real = _real(logits, ctx.vocab)
        padded = torch.empty(logits.shape, dtype=real.dtype, device=real.device)
        padded[:, ctx.vocab :] = 0
        result = padded[:, : ctx.vocab]
        torch.sub(real, largest[:, None], out=result).exp_().mul_((grad / total)[:, None])
        result[torch.arange(len(labels), device=labels.device), labels] -= grad  # deterministic, unlike scatter_add
        return padded.to(logits.dtype), None, None


def _real(logits: Tensor, vocab: int) -> Tensor:
    """The columns that are classes, in at least fp32: [N, p] -> [N, v]."""
    return logits[:, :vocab].to(torch.promote_types(logits.dtype, torch.float32))
