"""Optimizers side by side, on gradients that are a function of step, rank and name: no model and no data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_run.contracts import (
    ChunkOut,
    Init,
    Microbatch,
    Optimizer,
    ParameterSpec,
    ReadState,
    Segment,
    StatePiece,
)
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_engine.runtime.parameter_init import describe_parameters, initialise

#: Shapes of which none divides by the ranks, so that shares begin and end within parameters and within rows.
SHAPES: Mapping[str, tuple[int, ...]] = {
    "first": (7, 5),
    "first_bias": (7,),
    "second": (3, 11),
    "gain": (13,),
    "third": (1, 9),
}
Factory = Callable[[BuildContext], Optimizer]
#: Of one rank: name of a parameter, and what it finds at the end of its gradient.
Planted = tuple[int, str, float]


class OddChunk(nn.Module):
    """Parameters of :data:`SHAPES`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.parameter_specs = {name: ParameterSpec(Init("normal", 0.5)) for name in SHAPES}
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        """An optimizer runs no chunk."""
        raise NotImplementedError

    def segments(self) -> Sequence[Segment]:
        """None."""
        return ()


@dataclass
class Trained:
    """Norms by step, and in the end the weights by name."""

    norms: list[float]
    weights: dict[str, Any]


class Bench:
    """An optimizer attached to an :class:`OddChunk`, which starts alike everywhere."""

    def __init__(self, factory: Factory, context: BuildContext) -> None:
        self._rank = context.topology.data_rank
        chunk = OddChunk(context.dtypes.param)
        self.infos = describe_parameters(chunk)
        initialise(self.infos, seed=1)
        self.optimizer = factory(context)
        self.optimizer.attach([chunk], [self.infos], 1 / context.topology.sizes.data)

    def train(self, steps: Iterable[int], clip: float = 0.0) -> Trained:
        """Take ``steps``, none of which may be skipped."""
        return Trained([self.step(step, clip) for step in steps], self.weights())

    def step(self, step: int, clip: float = 0.0) -> float:
        """One step as the trainer takes it; the norm of its gradient."""
        found_inf = self.reduce(step)
        assert not found_inf
        norm = self.optimizer.clip_(clip).item()
        self.optimizer.step(1e-2 / step, 0.1)
        self.optimizer.start_param_sync()
        self.optimizer.ensure_ready(self.infos)
        return norm

    def reduce(self, step: int, planted: Planted | None = None) -> float:
        """The gradients of ``step``, reduced; found_inf."""
        optimizer = self.optimizer
        optimizer.zero_grad()
        for parameter, info in self.infos.items():
            gradient = random_gradient(parameter.shape, step, self._rank, info.name)
            if planted is not None and planted[:2] == (self._rank, info.name):
                gradient.view(-1)[-1] = planted[2]
            main_grad(parameter).add_(gradient)
        optimizer.start_grad_sync(0)
        optimizer.finish_grad_sync()
        return optimizer.unscale_(torch.ones(1)).item()

    def weights(self) -> dict[str, Any]:
        """A copy of every parameter, as arrays of fp32."""
        return {info.name: parameter.detach().float().clone().numpy() for parameter, info in self.infos.items()}


def random_gradient(shape: torch.Size, step: int, rank: int, name: str) -> Tensor:
    """What ``rank`` finds: numbers of very different sizes, so that the order of a sum would show."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + list(SHAPES).index(name.rpartition(".")[2]))
    return torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)


def gathered(pieces: Iterable[StatePiece]) -> dict[tuple[str, str], Tensor]:
    """Every field of every logical tensor, by (name, field), out of the pieces of all ranks.

    Raises AssertionError where a value comes twice or not at all.
    """
    state: dict[tuple[str, str], Tensor] = {}
    for name, field, starts, sizes, tensor in pieces:
        shape = SHAPES[name.rpartition(".")[2]] if sizes else ()
        whole = state.setdefault((name, field), torch.full(shape, torch.nan))
        box = whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
        assert box.isnan().all(), f"{field} of {name} at {starts} comes twice"
        box.copy_(tensor.detach())
    missing = [key for key, whole in state.items() if whole.isnan().any()]
    assert not missing, f"some of {missing} is missing"
    return state


def reader(state: Mapping[tuple[str, str], Tensor]) -> ReadState:
    """Looks boxes up in what :func:`gathered` returns."""

    def read(name: str, field: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        return state[name, field][tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]

    return read
