"""Output layer and loss in one: the values of whole logits, which never exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_run.config.request import Request
from megatron_run.contracts.schedule import LayoutSpec, looped_layout
from megatron_run.errors import InputError
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.nn import LinearCrossEntropy
from megatron_run_engine.runtime.gradients import GradientAccumulator, main_grad
from megatron_run_testing.build_contexts import (
    example_microbatch,
    logical_gradients,
    prepare,
    single_process_context,
)
from tests.support.training import train_many

S, B, H, VOCAB, PADDED = 16, 4, 8, 11, 128


def weight(dtype: torch.dtype = torch.float64) -> Parameter:
    """An output layer's weight with a gradient to add to."""
    made = Parameter(torch.randn(PADDED, H, generator=torch.Generator().manual_seed(1)).to(dtype))
    made.main_grad = torch.zeros_like(made, dtype=torch.promote_types(dtype, torch.float32))  # type: ignore[attr-defined]
    return made


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """X [s, b, h], labels [b, s], and the gradient of the losses [s, b], zero where a token is ignored."""
    random = torch.Generator().manual_seed(2)
    x = torch.randn(S, B, H, generator=random).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (B, S), generator=random)
    grad = torch.rand(S, B, generator=random) * (torch.rand(S, B, generator=random) > 0.25)
    return x, labels, grad.to(torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunks", [1, 3, 8, 1000])
def test_loss_and_gradients_are_those_of_whole_logits(chunks: int, smoothing: float) -> None:
    (x, labels, grad), shared = inputs(), weight()
    loss = LinearCrossEntropy(GradientAccumulator(), VOCAB, smoothing, chunks)(x, shared, labels)
    loss.backward(grad)
    other_x, other = x.detach().clone().requires_grad_(), shared.detach().clone().requires_grad_()
    logits = (other_x @ other.t())[..., :VOCAB].permute(1, 2, 0)  # [b, v, s]
    expected = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing).t()
    expected.backward(grad)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, other_x.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(main_grad(shared), other.grad, rtol=1e-12, atol=1e-12)


def test_a_split_backward_gives_the_weight_gradient_at_w() -> None:
    (x, labels, grad), whole, split = inputs(), weight(), weight()
    gradients = GradientAccumulator()
    LinearCrossEntropy(gradients, VOCAB, 0.0, 3)(x, whole, labels).backward(grad)
    expected, x.grad = x.grad, None
    loss = LinearCrossEntropy(gradients, VOCAB, 0.0, 3)(x, split, labels)
    with gradients.deferring((0, 0)):
        loss.backward(grad)
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    assert not main_grad(split).any()
    gradients.run_deferred((0, 0))
    assert torch.equal(main_grad(split), main_grad(whole))


class Largest(TorchDispatchMode):
    """The most values that a tensor made within has."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.values = max([self.values, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


def held(chunks: int) -> tuple[int, int]:
    """The largest tensor that a forward and backward make, and what they keep in between, in values."""
    model = GptOptions(num_layers=1, hidden_size=H, num_heads=2, vocab_size=4000, dropout=0.0, loss_chunks=chunks)
    context = single_process_context(model, dtype=torch.float32, train={"sequence_length": 64, "micro_batch_size": 4})
    layout = looped_layout(LayoutSpec(2, 1, 1, (1, 0)))
    chunk = Gpt(context, model).build_chunk(1, layout, DenseLayers(context), {})
    prepare(context, [chunk])
    x = torch.randn(64, 4, H, requires_grad=True)
    saved = list[int]()

    def keep(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with Largest() as largest:  # type: ignore[no-untyped-call]  # torch's
        with saved_tensors_hooks(keep, lambda x: x):
            total, _ = chunk(x, example_microbatch(4000, batch=4, length=64)).losses["lm"]
        total.backward()
    return largest.values, sum(saved)


def test_no_tensor_is_as_large_as_the_logits() -> None:
    logits = 64 * 4 * 4096
    assert held(1)[0] == logits
    assert held(1)[1] >= logits
    largest, kept = held(16)
    assert largest == logits // 16
    assert kept < logits // 16


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_learns_the_same(tied: bool) -> None:
    found = []
    for chunks in (1, 3):
        model = GptOptions(
            num_layers=1, hidden_size=16, num_heads=2, vocab_size=32, tie_embeddings=tied, loss_chunks=chunks
        )
        context = single_process_context(model)
        layout = looped_layout(LayoutSpec(stages=1, chunks=1, layers=1))
        chunk = Gpt(context, model).build_chunk(0, layout, DenseLayers(context), {})
        infos = prepare(context, [chunk])
        total, count = chunk(None, example_microbatch(32)).losses["lm"]
        total.backward()
        logits = chunk(None, example_microbatch(32, train=False))
        found.append((total, count, *logical_gradients(infos).values()))
        assert logits.losses["lm"][0].isfinite()
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_layers_without_it_say_what_to_type() -> None:
    class Without(DenseLayers):
        linear_cross_entropy = DenseLayers.__mro__[1].linear_cross_entropy  # type: ignore[attr-defined]

    with pytest.raises(InputError, match=r"model\.loss_chunks=2 asks for; set model\.loss_chunks=1"):
        Without(single_process_context()).linear_cross_entropy(10, 0.0, 2)


#: The least in which a second step and a second microbatch go on from a first.
SMALL = ("train.global_batch_size=4", "train.steps=2", "train.lr_warmup=0", "eval.batches=1")
#: Name -> (ranks' plugins, settings), with a layer on each stage.
RUNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tensor": (("parallel-layer=tensor",), ("model.num_layers=1", "parallel.tensor=2", "model.label_smoothing=0.1")),
    "sequence": (("parallel-layer=tensor",), ("model.num_layers=1", "parallel.tensor=2", "parallel.sequence=true")),
    "a split backward": (("schedule=zero-bubble",), ("model.num_layers=2",)),
}


@pytest.mark.multiproc
def test_ranks_learn_the_same() -> None:
    """Vocabulary-parallel, and a tied matrix on two stages whose gradient is put off to W."""
    requests = [
        Request(
            configs=("preset:tiny",),
            sets=(*sets, *SMALL, "model.dropout=0", f"model.loss_chunks={chunks}"),
            plugins=plugins,
            nproc=2,
        )
        for plugins, sets in RUNS.values()
        for chunks in (1, 5)
    ]
    whole, in_chunks = (train_many(2, requests)[start::2] for start in (0, 1))
    for mine, other in zip(in_chunks, whole, strict=True):
        assert mine[0].losses == pytest.approx(other[0].losses, rel=2e-6)
        assert mine[0].norms == pytest.approx(other[0].norms, rel=2e-5)
        assert mine[0].validation == pytest.approx(other[0].validation, rel=2e-6)
