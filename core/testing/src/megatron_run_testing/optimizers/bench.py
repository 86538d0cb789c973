"""An optimizer on a chunk of two parameters, with gradients from a formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megatron_run.contracts import ChunkOut, Init, Microbatch, Optimizer, ParameterSpec, Segment
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_engine.runtime.parameter_init import describe_parameters
from megatron_run_testing.build_contexts import single_process_context

OptimizerFactory = Callable[[BuildContext], Optimizer]
#: (gradient of the weight, gradient of the bias)
Gradients = tuple[Tensor, Tensor]

#: Neither powers of two nor multiples of a number of ranks, so that shards begin inside the matrix and inside its rows.
ROWS, COLUMNS = 21, 13


class SmallChunk(nn.Module):
    """A chunk of a matrix, which decays, and a bias, which does not.

    Their values are small fractions that every type represents exactly.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.parameter_specs = {"weight": ParameterSpec(Init("normal", 0.5)), "bias": ParameterSpec(Init("zeros"))}
        values = torch.arange(ROWS * COLUMNS, device=device).view(ROWS, COLUMNS) % 7 - 3
        self.weight = nn.Parameter((values / 4).to(dtype))
        self.bias = nn.Parameter(torch.full((ROWS,), 0.5, dtype=dtype, device=device))

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        """X [s, b, columns] -> [s, b, rows]."""
        assert x is not None  # only a first chunk is called without input
        return ChunkOut(nn.functional.linear(x, self.weight, self.bias))

    def segments(self) -> Sequence[Segment]:
        """No segments: nothing of it is captured."""
        return ()


class Bench:
    """An optimizer attached to a :class:`SmallChunk` with the parameters ``weight`` and ``bias``.

    ``context`` defaults to that of one fp32 rank. ``grad_scale`` defaults to 1 / data-parallel size, so that gradients
    are averaged over the ranks.
    """

    def __init__(
        self, factory: OptimizerFactory, context: BuildContext | None = None, grad_scale: float | None = None
    ) -> None:
        context = context or single_process_context(dtype=torch.float32)
        chunk = SmallChunk(context.dtypes.param, context.device)
        self.infos = describe_parameters(chunk)
        self.optimizer = factory(context)
        scale = 1 / context.topology.sizes.data if grad_scale is None else grad_scale
        self.optimizer.attach([chunk], [self.infos], scale)
        self.weight, self.bias = chunk.weight, chunk.bias

    def reduce(self, weight: Tensor | float, bias: Tensor | float) -> None:
        """Set gradients as if a backward had produced them, and finish their reduction."""
        self.optimizer.zero_grad()
        main_grad(self.weight).add_(weight)
        main_grad(self.bias).add_(bias)
        self.optimizer.start_grad_sync(0)
        self.optimizer.finish_grad_sync()

    def update(self, lr: float, weight_decay: float) -> None:
        """Step, and wait until the parameters are updated."""
        self.optimizer.step(lr, weight_decay)
        self.optimizer.start_param_sync()
        self.optimizer.ensure_ready([self.weight, self.bias])

    def step(self, gradients: Gradients, *, max_norm: float = 0.0, lr: float = 0.01, decay: float = 0.1) -> Tensor:
        """A whole step as in the trainer, skipped on overflow; returns found_inf, norm and zeros, fp32 [3]."""
        self.reduce(*gradients)
        found_inf = self.optimizer.unscale_(torch.ones(1))
        if found_inf.item():
            return torch.cat([found_inf, torch.full((2,), torch.nan)])
        norm, zeros = self.optimizer.clip_(max_norm), self.optimizer.count_zeros()
        self.update(lr, decay)
        return torch.cat([number.reshape(1) for number in (found_inf, norm, zeros)])

    def values(self) -> dict[str, Tensor]:
        """A copy of the parameters by name."""
        return {"weight": self.weight.detach().clone(), "bias": self.bias.detach().clone()}


def gradients(step: int, rank: int = 0) -> Gradients:
    """The gradients of ``rank`` in ``step``: eighths from -1 to 1, whose sums over ranks are exact in every order."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    weight, bias = (torch.randint(-8, 9, size, generator=generator) / 8 for size in ((ROWS, COLUMNS), (ROWS,)))
    return weight, bias


def mean_gradients(step: int, ranks: int) -> Gradients:
    """The mean of the gradients of ``ranks`` ranks in ``step``."""
    weights, biases = zip(*(gradients(step, rank) for rank in range(ranks)), strict=True)
    return torch.stack(weights).mean(0), torch.stack(biases).mean(0)
