"""An optimizer on a chunk of two parameters, with gradients from a formula, and its state as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_run.contracts import (
    MASTER,
    ChunkOut,
    Init,
    Lender,
    Microbatch,
    Optimizer,
    ParameterSpec,
    Segment,
    StatePiece,
)
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_engine.runtime.parameter_init import describe_parameters
from megatron_run_testing import CheckFailed
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
        self.parameter_specs: Mapping[str, ParameterSpec] = {
            "weight": ParameterSpec(Init("normal", 0.5)),
            "bias": ParameterSpec(Init("zeros")),
        }
        values = torch.arange(ROWS * COLUMNS, device=device).view(ROWS, COLUMNS) % 7 - 3
        self.weight = nn.Parameter((values / 4).to(dtype))
        self.bias = nn.Parameter(torch.full((ROWS,), 0.5, dtype=dtype, device=device))

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        """X [s, b, columns] -> [s, b, rows]."""
        assert x is not None  # only a first chunk is called without input
        return ChunkOut(self._linear(x))

    def segments(self) -> Sequence[Segment]:
        """One, which reads both."""
        read = (self.weight, self.bias)
        return (Segment("linear", 0, 0, self._linear, ("x",), ("x",), read, why_eager="nothing is captured here"),)

    def _linear(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


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
        self.one = torch.ones(1, device=context.device)

    def reduce(self, weight: Tensor | float, bias: Tensor | float) -> None:
        """Set gradients as if a backward had produced them, and finish their reduction."""
        self.optimizer.zero_grad()
        for parameter, gradient in ((self.weight, weight), (self.bias, bias)):
            add_gradient(self.optimizer, parameter, torch.as_tensor(gradient, device=self.one.device))
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
        numbers = numbers_of(self.optimizer, self.one, max_norm)
        if not numbers[0].item():
            self.update(lr, decay)
        return numbers

    def values(self) -> dict[str, Tensor]:
        """A copy of the parameters by name."""
        return values_of(self.optimizer, {"weight": self.weight, "bias": self.bias})


def add_gradient(optimizer: Optimizer, parameter: Parameter, gradient: Tensor) -> None:
    """Add ``gradient`` to the ``main_grad`` of ``parameter``, as a backward does."""
    if isinstance(optimizer, Lender):
        optimizer.before_adding((parameter,))
    main_grad(parameter).add_(gradient)


def values_of(optimizer: Optimizer, named: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """A copy of the parameters by name, read as a segment reads them."""
    found = {}
    for name, parameter in named.items():
        optimizer.ensure_ready((parameter,))
        found[name] = parameter.detach().clone()
        if isinstance(optimizer, Lender):
            optimizer.release((parameter,))
    return found


def numbers_of(optimizer: Optimizer, one: Tensor, max_norm: float) -> Tensor:
    """Unscale by ``one`` and clip; returns found_inf, norm and zeros (NaN on overflow), fp32 [3]."""
    found_inf = optimizer.unscale_(one)
    norm, zeros = optimizer.clip_(max_norm), optimizer.count_zeros()
    if found_inf.item():
        return torch.cat([found_inf, found_inf.new_full((2,), torch.nan)])
    return torch.cat([number.reshape(1) for number in (found_inf, norm, zeros)])


def gradients(step: int, rank: int = 0) -> Gradients:
    """The gradients of ``rank`` in ``step``: eighths from -1 to 1, whose sums over ranks are exact in every order."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    weight, bias = (torch.randint(-8, 9, size, generator=generator) / 8 for size in ((ROWS, COLUMNS), (ROWS,)))
    return weight, bias


def mean_gradients(step: int, ranks: int) -> Gradients:
    """The mean of the gradients of ``ranks`` ranks in ``step``."""
    weights, biases = zip(*(gradients(step, rank) for rank in range(ranks)), strict=True)
    return torch.stack(weights).mean(0), torch.stack(biases).mean(0)


Shape = tuple[int, ...]


class SavedState:
    """Whole tensors by (name, field), assembled from the ``pieces`` of all ranks.

    ``shapes`` are the shapes of the logical tensors by name. Raises :class:`CheckFailed` unless all of them have master
    weights, and every value of every field comes exactly once.
    """

    def __init__(self, pieces: Iterable[StatePiece], shapes: Mapping[str, Shape]) -> None:
        together: dict[tuple[str, str], list[StatePiece]] = {(name, MASTER): [] for name in shapes}
        for piece in pieces:
            if piece.name not in shapes:
                raise CheckFailed(f"iter_state gives {piece.name!r}, which is not a logical tensor")
            together.setdefault((piece.name, piece.field), []).append(piece)
        self.tensors = {
            (name, field): _joined(f"{field} of {name}", found, shapes[name] if field == MASTER else _extent(found))
            for (name, field), found in together.items()
        }

    def __call__(self, name: str, field: str, starts: Shape, sizes: Shape) -> Tensor:
        """The result of :meth:`read`: a ``ReadState`` that also lists its fields, as that of a saved step."""
        return self.read(name, field, starts, sizes)

    def load_into(self, optimizer: Optimizer) -> None:
        """Load it as a resumed run does: masters alone, saved before a first step, are weights without state.

        A rule that PyTorch gives no state before its first step (Lion, RMSprop) then has none to save.
        """
        updated = any(field != MASTER for _, field in self.tensors)
        (optimizer.load_state if updated else optimizer.load_weights)(self)

    def shapes(self, name: str) -> dict[str, Shape]:
        """The shapes of the fields of ``name``."""
        return {field: tuple(value.shape) for (owner, field), value in self.tensors.items() if owner == name}

    def read(self, name: str, field: str, starts: Shape, sizes: Shape) -> Tensor:
        """A box of ``field`` of ``name``. Raises :class:`CheckFailed` if it was not saved."""
        if (name, field) not in self.tensors:
            raise CheckFailed(f"load_state asks for {field} of {name}, which iter_state did not give")
        return self.tensors[name, field][_box(starts, sizes)]


def _joined(what: str, pieces: Iterable[StatePiece], shape: Shape) -> Tensor:
    whole, times = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
    for piece in pieces:
        if tuple(piece.tensor.shape) != piece.sizes:
            raise CheckFailed(f"a piece of {what} has shape {tuple(piece.tensor.shape)}, but declares {piece.sizes}")
        whole = whole.to(piece.tensor.dtype)
        whole[_box(piece.starts, piece.sizes)] = piece.tensor.detach().cpu()
        times[_box(piece.starts, piece.sizes)] += 1
    if not (times == 1).all():
        wrong = times[times != 1]
        raise CheckFailed(f"{len(wrong)} values of {what} are given {int(wrong[0])} times, expected once")
    return whole


def _extent(pieces: Iterable[StatePiece]) -> Shape:
    """The smallest shape that contains all ``pieces``; a field's shape may differ from its tensor's."""
    ends = [[start + size for start, size in zip(piece.starts, piece.sizes, strict=True)] for piece in pieces]
    return tuple(map(max, *ends)) if len(ends) > 1 else tuple(ends[0])


def _box(starts: Shape, sizes: Shape) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
