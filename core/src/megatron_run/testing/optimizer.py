"""The conformance suite of kind ``optimizer``: what holds for every update rule, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megatron_run.contracts import (
    BuildContext,
    ChunkOut,
    Init,
    Microbatch,
    Optimizer,
    ParameterSpec,
    Segment,
)
from megatron_run.gradients import main_grad
from megatron_run.parameters import describe_parameters, initialise
from megatron_run.testing.check import Check, CheckFailed
from megatron_run.testing.context import single_process_context

OptimizerFactory = Callable[[BuildContext], Optimizer]


class SmallChunk(nn.Module):
    """A matrix, which decays, and a bias, which does not: enough of a chunk for an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter_specs = {"weight": ParameterSpec(Init("normal", 0.5)), "bias": ParameterSpec(Init("zeros"))}
        self.weight = nn.Parameter(torch.empty(5, 3))
        self.bias = nn.Parameter(torch.empty(5))

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        """X [s, b, 3] -> [s, b, 5]."""
        assert x is not None  # only a first chunk is called without input
        return ChunkOut(nn.functional.linear(x, self.weight, self.bias))

    def segments(self) -> Sequence[Segment]:
        """None of it is captured."""
        return ()


class Bench:
    """An optimizer attached to a :class:`SmallChunk`, with ``weight`` and ``bias`` at hand."""

    def __init__(self, factory: OptimizerFactory, grad_scale: float = 1.0) -> None:
        context = single_process_context(dtype=torch.float32)
        chunk = SmallChunk()
        infos = describe_parameters(chunk)
        initialise(infos, seed=1)
        self.optimizer = factory(context)
        self.optimizer.attach([chunk], [infos], grad_scale)
        self.weight, self.bias = chunk.weight, chunk.bias

    def reduce(self, weight: Tensor | float, bias: Tensor | float) -> None:
        """Pretend that a backward produced these gradients, and finish their reduction."""
        self.optimizer.zero_grad()
        main_grad(self.weight).add_(weight)
        main_grad(self.bias).add_(bias)
        self.optimizer.start_grad_sync(0)
        self.optimizer.finish_grad_sync()

    def update(self, lr: float, weight_decay: float) -> None:
        """Step, and wait until the parameters hold their new values."""
        self.optimizer.step(lr, weight_decay)
        self.optimizer.start_param_sync()
        self.optimizer.ensure_ready([self.weight, self.bias])


def optimizer_checks(factory: OptimizerFactory) -> tuple[Check, ...]:
    """The checks of an optimizer; ``factory`` makes a fresh one from a context."""
    return (
        Check("main_grad keeps its storage and is cleared by zero_grad", lambda: _check_storage(factory)),
        Check("gradients are multiplied by grad_scale once", lambda: _check_grad_scale(factory)),
        Check("start_grad_sync is idempotent", lambda: _check_idempotent(factory)),
        Check("unscale_ multiplies and finds non-finite values", lambda: _check_unscale(factory)),
        Check("clip_ returns the norm and clips to it", lambda: _check_clip(factory)),
        Check("step moves against the gradient", lambda: _check_descent(factory)),
        Check("weight decay shrinks matrices and leaves biases", lambda: _check_decay(factory)),
        Check("a stage without parameters is no special case", lambda: _check_nothing(factory)),
    )


def _check_storage(factory: OptimizerFactory) -> None:
    bench = Bench(factory)
    address = main_grad(bench.weight).data_ptr()
    for step in range(3):
        bench.reduce(1.0, 1.0)
        bench.optimizer.unscale_(torch.ones(1))
        bench.update(0.1, 0.0)
        bench.optimizer.zero_grad()
        if main_grad(bench.weight).data_ptr() != address:
            raise CheckFailed(f"step {step}: main_grad of weight moved to another storage")
        if main_grad(bench.weight).any() or main_grad(bench.bias).any():
            raise CheckFailed(f"step {step}: zero_grad left values in main_grad")


def _check_grad_scale(factory: OptimizerFactory) -> None:
    bench = Bench(factory, grad_scale=0.25)
    bench.reduce(8.0, 8.0)
    _expect("main_grad of 8.0 reduced with grad_scale 0.25", main_grad(bench.weight), torch.full((5, 3), 2.0))


def _check_idempotent(factory: OptimizerFactory) -> None:
    bench = Bench(factory, grad_scale=0.5)
    bench.optimizer.zero_grad()
    main_grad(bench.weight).fill_(4.0)
    for _ in range(3):
        bench.optimizer.start_grad_sync(0)
    bench.optimizer.finish_grad_sync()
    _expect("main_grad after start_grad_sync three times", main_grad(bench.weight), torch.full((5, 3), 2.0))


def _check_unscale(factory: OptimizerFactory) -> None:
    bench = Bench(factory)
    bench.reduce(8.0, 4.0)
    found = bench.optimizer.unscale_(torch.tensor([0.5]))
    if found.item():
        raise CheckFailed(f"found_inf is {found.item()} for finite gradients, expected 0")
    _expect("main_grad of 8.0 unscaled by 0.5", main_grad(bench.weight), torch.full((5, 3), 4.0))
    for value in (float("inf"), float("nan")):
        bias = torch.zeros(5)
        bias[3] = value
        bench.reduce(1.0, bias)
        if not bench.optimizer.unscale_(torch.ones(1)).item():
            raise CheckFailed(f"found_inf is 0 although a gradient holds {value}")


def _check_clip(factory: OptimizerFactory) -> None:
    norm = (15 * 9.0 + 5 * 16.0) ** 0.5
    for max_norm in (0.0, norm / 2, norm * 2):
        bench = Bench(factory)
        bench.reduce(3.0, 4.0)
        bench.optimizer.unscale_(torch.ones(1))
        found = bench.optimizer.clip_(max_norm)
        _expect(f"the norm returned by clip_({max_norm:g})", found.reshape(1), torch.tensor([norm]))
        coefficient = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
        _expect(f"main_grad after clip_({max_norm:g})", main_grad(bench.bias), torch.full((5,), 4.0 * coefficient))


def _check_descent(factory: OptimizerFactory) -> None:
    bench = Bench(factory)
    before = bench.weight.detach().clone()
    bench.reduce(1.0, 0.0)
    bench.optimizer.unscale_(torch.ones(1))
    bench.update(0.01, 0.0)
    moved = bench.weight.detach() - before
    if not (moved < 0).all():
        raise CheckFailed(f"a positive gradient moved the weight by up to {moved.max().item():g}, expected below 0")


def _check_decay(factory: OptimizerFactory) -> None:
    bench = Bench(factory)
    with torch.no_grad():
        bench.weight.fill_(2.0)
        bench.bias.fill_(2.0)
    bench.reduce(0.0, 0.0)
    bench.optimizer.unscale_(torch.ones(1))
    bench.update(0.1, 0.5)
    _expect("a bias of 2.0 without gradient after weight decay", bench.bias, torch.full((5,), 2.0))
    if not (bench.weight < 2.0).all():
        raise CheckFailed("weight decay 0.5 left a matrix as it was")


def _check_nothing(factory: OptimizerFactory) -> None:
    optimizer = factory(single_process_context(dtype=torch.float32))
    optimizer.attach([], [], 1.0)
    optimizer.zero_grad()
    optimizer.finish_grad_sync()
    _expect("found_inf of no gradients", optimizer.unscale_(torch.ones(1)), torch.zeros(1))
    _expect("the norm of no gradients", optimizer.clip_(1.0).reshape(1), torch.zeros(1))
    optimizer.step(0.1, 0.1)
    optimizer.start_param_sync()


def _expect(what: str, found: Tensor, expected: Tensor) -> None:
    values = found.detach().cpu()
    if not torch.allclose(values, expected, rtol=1e-5, atol=1e-7):
        raise CheckFailed(f"{what} is {values.flatten()[0].item():g}, expected {expected.flatten()[0].item():g}")
