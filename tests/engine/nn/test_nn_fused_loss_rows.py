"""The kernels of the cross entropy against the layer's own code in float64: by Triton's interpreter, and on a GPU.

All of what is interpreted runs in one process, once for the file.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.nn.cross_entropy import CrossEntropy, LinearCrossEntropy, cross_entropy
from megatron_run_engine.nn.fused import fuses, row_statistics, write_gradient
from megatron_run_engine.runtime.comm import create_groups
from megatron_run_engine.runtime.gradients import GradientAccumulator
from tests.support.ranks import run_ranks

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Kinds of logits: as of a model, with values far apart, and with classes that are ruled out.
KINDS = ("plain", "extreme", "ruled out")
#: Classes, and the columns that hold them: one block that is not full, and two of which the second is not full.
SIZES = ((21, 24), (5003, 5008))
#: The same for each of two ranks. Of the last one, the second rank has padding alone.
SHARES = ((21, 16), (12, 16))
SMOOTHINGS = (0.0, 0.2)
TOKENS = 6


class Case(NamedTuple):
    """The numbers that a loss is computed from."""

    dtype: str
    kind: str
    vocab: int
    columns: int
    smoothing: float


CASES = [
    Case(dtype, kind, *size, smoothing)
    for dtype, kind, size, smoothing in product(TYPES, KINDS, SIZES, SMOOTHINGS)
    if kind == "plain" or (dtype == "bf16" and size == SIZES[0])
]
SHARED = [Case(dtype, "plain", *size, smoothing) for dtype in TYPES for size in SHARES for smoothing in SMOOTHINGS]

#: Losses, and the gradient of the logits.
Found = tuple[Tensor, Tensor]


def inputs(case: Case, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, v], labels [N], and the gradient of the losses [N]: 0 where a token is ignored."""
    random = torch.Generator().manual_seed(case.vocab)
    logits = torch.randn(tokens, case.vocab, generator=random) * 2
    labels = torch.randint(case.vocab, (tokens,), generator=random)
    labels[-1] = case.vocab - 1
    if case.kind == "extreme":
        logits[:, ::5] += 1e4
        logits[::2, 1::7] -= 1e4
    if case.kind == "ruled out":
        barred = torch.rand(tokens, case.vocab, generator=random) < 0.3
        logits[barred.scatter(1, labels[:, None], value=False)] = -torch.inf
    grads = torch.rand(tokens, generator=random) * (torch.arange(tokens) % 3 > 0)
    return logits.to(TYPES[case.dtype]), labels, grads


def padded(logits: Tensor, columns: int) -> Tensor:
    """[N, v] -> [N, q]: padding has values that would show."""
    return torch.nn.functional.pad(logits, (0, columns - logits.shape[1]), value=3e4)


def expected(case: Case, tokens: int = TOKENS) -> Found:
    """By the layer's own code in float64, of the whole vocabulary."""
    logits, labels, grads = inputs(case, tokens)
    leaf = logits.double().requires_grad_()
    loss = cross_entropy(leaf, labels, case.vocab, case.smoothing)
    return loss.detach(), torch.autograd.grad(loss, leaf, grads.double())[0]


def alone(case: Case, device: str = "cpu", tokens: int = TOKENS) -> Found:
    """By the kernels, on one rank."""
    logits, labels, grads = (each.to(device) for each in inputs(case, tokens))
    leaf = padded(logits, case.columns).requires_grad_()
    assert fuses(leaf)
    loss = cross_entropy(leaf, labels, case.vocab, case.smoothing)
    return loss.detach(), torch.autograd.grad(loss, leaf, grads)[0]


def of_a_rank(rank: int, world: int) -> list[Found]:
    """By the kernels, of this rank's columns."""
    topology = Topology(Sizes(tensor=world), rank)
    peers = create_groups(topology, timedelta(seconds=60)).parallel_group(topology, "tensor")
    found = []
    for case in SHARED:
        logits, labels, grads = inputs(case)
        whole = padded(logits, case.columns * world)
        share = whole[:, rank * case.columns : (rank + 1) * case.columns].clone().requires_grad_()
        assert fuses(share)
        loss = cross_entropy(share, labels, case.vocab, case.smoothing, peers)
        found.append((loss.detach(), torch.autograd.grad(loss, share, grads)[0]))
    return found


def written_over(device: str = "cpu") -> dict[str, Any]:
    """The fate of logits that an operation made, and of those that are a leaf."""
    logits, labels, grads = (each.to(device) for each in inputs(CASES[0]))
    leaf = padded(logits, 24)[None].requires_grad_()  # [1, b, q]
    before, labels, grads = leaf.detach().clone(), labels[:, None], grads[None]
    layer = CrossEntropy(21)
    found: dict[str, Any] = {"leaf": torch.autograd.grad(layer(leaf, labels), leaf, grads)[0]}
    found["leaf stays"] = torch.equal(leaf, before)
    made = leaf * 1
    loss = layer(made, labels)
    found["made"] = torch.autograd.grad(loss, made, grads, retain_graph=True)[0]
    found["same memory"] = found["made"].data_ptr() == made.data_ptr()
    found["again"] = _error(lambda: torch.autograd.grad(loss, made, grads))
    made = leaf * 1
    both = (made * made).sum() + (layer(made, labels) * grads).sum()
    found["another reader"] = _error(both.backward)
    return found


def _error(work: Any) -> str:
    try:
        work()
    except RuntimeError as error:
        return str(error)
    return ""


def in_chunks(device: str = "cpu") -> dict[str, Tensor]:
    """A head that makes logits of some tokens at a time: its loss, and the gradients of x and of the weight."""
    random = torch.Generator().manual_seed(7)
    x = torch.randn(5, 2, 8, generator=random).to(device).requires_grad_()
    weight = Parameter(torch.randn(24, 8, generator=random).to(device))
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    labels = torch.randint(21, (2, 5), generator=random).to(device)
    losses = LinearCrossEntropy(GradientAccumulator(), 21, 0.1, 3)(x, weight, labels)
    losses.square().sum().backward()
    assert x.grad is not None
    return {"loss": losses.detach(), "x": x.grad, "weight": weight.main_grad}  # type: ignore[attr-defined]


def whole_head() -> dict[str, Tensor]:
    """The same in float64, with whole logits and the layer's own code."""
    random = torch.Generator().manual_seed(7)
    x = torch.randn(5, 2, 8, generator=random).double().requires_grad_()
    weight = torch.randn(24, 8, generator=random).double().requires_grad_()
    labels = torch.randint(21, (2, 5), generator=random)
    losses = CrossEntropy(21, 0.1)(x @ weight.t(), labels)
    of_x, of_weight = torch.autograd.grad(losses.square().sum(), (x, weight))
    return {"loss": losses.detach(), "x": of_x, "weight": of_weight}


def everything() -> dict[str, Any]:
    """All that is interpreted."""
    return {
        "alone": [alone(case) for case in CASES],
        "shared": run_ranks(of_a_rank, 2),
        "written": written_over(),
        "chunks": in_chunks(),
    }


def check(found: Found, case: Case, tokens: int = TOKENS) -> None:
    losses, gradient = expected(case, tokens)
    assert found[0].dtype == torch.float32
    assert found[1].dtype == TYPES[case.dtype]
    torch.testing.assert_close(found[0].cpu().double(), losses, rtol=2e-6, atol=2e-6)
    rounding = max(torch.finfo(TYPES[case.dtype]).eps, 2e-5)
    torch.testing.assert_close(found[1][:, : case.vocab].cpu().double(), gradient, rtol=rounding, atol=1e-7)
    assert not found[1][:, case.vocab :].any()


def check_written(found: dict[str, Any]) -> None:
    assert found["leaf stays"]
    assert found["same memory"]
    torch.testing.assert_close(found["made"], found["leaf"], rtol=0, atol=0)
    assert "ran twice" in found["again"]
    assert "modified by an inplace operation" in found["another reader"]


@pytest.mark.multiproc
class TestInterpreted:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
    def test_losses_and_gradients_are_those_of_float64(self, found: dict[str, Any], case: Case) -> None:
        check(found["alone"][CASES.index(case)], case)

    @pytest.mark.parametrize("case", SHARED, ids=lambda case: "-".join(map(str, case)))
    def test_so_they_are_if_two_ranks_share_the_classes(self, found: dict[str, Any], case: Case) -> None:
        ranks = [rank[SHARED.index(case)] for rank in found["shared"]]
        torch.testing.assert_close(ranks[0][0], ranks[1][0], rtol=0, atol=0)
        check((ranks[0][0], torch.cat([gradient for _, gradient in ranks], 1)), case)

    def test_the_gradient_takes_the_place_of_logits_that_an_operation_made(self, found: dict[str, Any]) -> None:
        check_written(found["written"])

    def test_in_chunks_the_gradients_are_those_of_whole_logits(self, found: dict[str, Any]) -> None:
        for name, value in whole_head().items():
            torch.testing.assert_close(found["chunks"][name].double(), value, rtol=1e-5, atol=1e-5)


def test_elsewhere_and_in_float64_nothing_is_fused() -> None:
    assert not fuses(torch.ones(2, 3))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert fuses(torch.empty(2, 3, device="cuda"))
        assert not fuses(torch.empty(2, 3, device="cuda", dtype=torch.float64))
        assert not fuses(torch.empty(3, 2, device="cuda").t())


def test_a_fake_gpu_gets_shapes_and_no_kernel() -> None:
    with FakeTensorMode(), torch.no_grad():
        logits = torch.empty(7, 24, device="cuda", dtype=torch.bfloat16)
        column = torch.zeros(7, dtype=torch.int64, device="cuda")
        holds_label = torch.ones(7, dtype=torch.bool, device="cuda")
        statistics = row_statistics(logits, column, 21, spreads=True)
        assert (statistics.shape, statistics.dtype, statistics.device.type) == ((4, 7), torch.float32, "cuda")
        rows = torch.empty(7, device="cuda")
        write_gradient(logits, logits, (column, holds_label), (rows, rows, rows), (21, 1.0, 0.0))


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
    def test_losses_and_gradients_are_those_of_float64(self, case: Case) -> None:
        check(alone(case, "cuda"), case)

    def test_the_gradient_takes_the_place_of_logits_that_an_operation_made(self) -> None:
        check_written(written_over("cuda"))

    def test_in_chunks_the_gradients_are_those_of_whole_logits(self) -> None:
        found = in_chunks("cuda")
        for name, value in whole_head().items():
            torch.testing.assert_close(found[name].cpu().double(), value, rtol=1e-5, atol=1e-5)

    def test_rows_beyond_32_bit_offsets_are_those_of_float64(self) -> None:
        rows, vocab = 43_008, 50_257  # 2.16 billion values of logits
        logits = torch.randn(8, 50_304, device="cuda", dtype=torch.bfloat16).repeat(rows // 8, 1).requires_grad_()
        labels = torch.arange(8, device="cuda").repeat(rows // 8)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = CrossEntropy(vocab)((logits * 1)[None], labels[:, None])
        loss.sum().backward()
        assert torch.cuda.max_memory_allocated() - before < 2.1 * logits.nbytes  # the product, and the leaf's gradient
        assert logits.grad is not None
        few = logits[:8].detach().double().requires_grad_()
        expected = cross_entropy(few, labels[:8], vocab)
        (slope,) = torch.autograd.grad(expected.sum(), few)
        torch.testing.assert_close(loss[0, -8:].double(), expected, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(logits.grad[-8:].double(), slope, rtol=2**-7, atol=1e-7)
