"""Cross entropy over a padded vocabulary."""

import math

import torch
from torch.nn import functional as F

from megatron_run.nn.cross_entropy import cross_entropy


def test_loss_and_gradient_are_those_of_the_real_columns() -> None:
    logits, labels = torch.randn(9, 16).double(), torch.randint(11, (9,))
    weights = torch.randn(9).double()
    plain, padded = logits[:, :11].clone().requires_grad_(), logits.clone().requires_grad_()
    expected = F.cross_entropy(plain, labels, reduction="none")
    found = cross_entropy(padded, labels, 11)
    torch.testing.assert_close(found, expected)
    expected.backward(weights)
    found.backward(weights)
    assert padded.grad is not None
    torch.testing.assert_close(padded.grad[:, :11], plain.grad)
    assert not padded.grad[:, 11:].any()


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    logits, labels = torch.randn(3, 6).double().requires_grad_(), torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, labels, 5), (logits,))


def test_large_logits_and_large_padding_neither_overflow_nor_count() -> None:
    logits = torch.tensor([[1e4, -1e4, 1e30], [3e4, 3e4, 1e30]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0, 1]), 2)
    torch.testing.assert_close(loss, torch.tensor([0.0, math.log(2)]))
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_16_bit_logits_give_a_loss_in_fp32_and_a_gradient_in_their_own_dtype() -> None:
    logits, labels = torch.randn(64, 32).bfloat16().requires_grad_(), torch.randint(32, (64,))
    loss = cross_entropy(logits, labels, 32)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), labels, reduction="none"))
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
