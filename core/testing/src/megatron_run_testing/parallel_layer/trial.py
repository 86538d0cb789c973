"""One layer against its oracle: output, initial values and every gradient, on all ranks that share the layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_run.contracts import ChunkOut, Init, Microbatch, ParamInfo, Part, Segment
from megatron_run.errors import InputError
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_engine.runtime.parameter_init import initialise, unspecified
from megatron_run_testing import CheckFailed
from megatron_run_testing.build_contexts import prepare
from megatron_run_testing.parallel_layer.cases import Case, Factors, factors, gradients, merge
from megatron_run_testing.parallel_layer.member import Member, Rank

if TYPE_CHECKING:
    from megatron_run.contracts import Adapters, ParallelLayers

Values = NDArray[np.float64]
#: Seed and form of the parameters' values in a trial. Biases are random too: from zero, a missing one would not show.
_SEED, _RANDOM = 11, Init("normal", 0.5)


class Trial(Protocol):
    """A trial that runs on every rank; ``judge`` then compares the results of all ranks."""

    @property
    def name(self) -> str:
        """The name of the check."""

    def run(self, rank: Rank) -> Any:
        """Run on this rank, together with its peers; the result is sent to another process."""

    def judge(self, found: Mapping[Member, Any], tolerance: float) -> str | None:
        """Raise :class:`CheckFailed`, which states where, unless the ranks' results are as expected.

        Returns the reason if there was nothing to try.
        """


@dataclass(frozen=True)
class Piece:
    """One rank's rows and columns of a logical tensor. ``initial`` is None where the factory may choose.

    ``gradient`` is accumulated by one backward, ``both`` by a whole and a split backward together.
    """

    part: Part
    initial: Values | None
    gradient: Values
    both: Values
    partial: bool
    counted: bool
    decay: bool

    @property
    def box(self) -> tuple[slice, ...]:
        """The piece's slices of the logical tensor."""
        rows = slice(self.part.start, self.part.start + len(self.part.local))
        columns = (slice(self.part.column, self.part.column + width) for width in self.gradient.shape[1:])
        return rows, *columns


@dataclass(frozen=True)
class Outcome:
    """The results of one layer on one rank; ``pieces`` are by the logical tensor's canonical name."""

    output: Tensor
    input_gradients: tuple[Tensor | None, ...]
    pieces: dict[str, Piece]


@dataclass(frozen=True)
class LayerTrial:
    """Runs one case's layer: a forward, a whole backward, and another backward in two halves."""

    case: Case
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        """The name of the case."""
        return self.case.name

    @cached_property
    def plain(self) -> Outcome:
        """The results of the oracle on the whole inputs, without adapters."""
        rank = Rank.alone(DenseLayers, self.dtype, self.device)
        context = rank.context()
        return self._try(self._expected_layer(context), context, rank, None)

    def _expected_layer(self, context: BuildContext) -> nn.Module:
        return (self.case.oracle or self.case.make)(DenseLayers(context))

    def expected(self, adapters: Adapters | None, names: Collection[str]) -> Outcome:
        """The same where matrices that ``names`` say are adapted have their adapters merged into them."""
        if adapters is None or not set(names) - self.plain.pieces.keys():
            return self.plain
        rank = Rank.alone(DenseLayers, self.dtype, self.device)
        context, made = rank.context(), dict[str, Factors]()

        def adapt(infos: Mapping[Parameter, ParamInfo]) -> None:
            made.update(factors(infos, adapters, names, _SEED, _RANDOM))
            merge(infos, made, adapters.scale)

        outcome = self._try(self._expected_layer(context), context, rank, None, adapt)
        for name, both in made.items():
            merged = torch.from_numpy(outcome.pieces[name].gradient)
            for of, gradient in gradients(both, merged, adapters.scale):
                values, shape = values_of(gradient), tuple(gradient.shape)
                start = np.zeros(shape) if of == both.up else None  # training starts at the model as it was
                part = Part(of, shape, range(shape[0]))
                outcome.pieces[of] = Piece(part, start, values, 2 * values, partial=False, counted=True, decay=True)
        return outcome

    def run(self, rank: Rank) -> Any:
        """The results on this rank, or the reason why there is nothing to try."""
        context = rank.context()
        layers = rank.create(context)
        layer = self._made(layers)
        if isinstance(layer, str):
            return layer
        outcome = self._try(layer, context, rank, self.plain.output)
        found = (None if gradient is None else values_of(gradient) for gradient in outcome.input_gradients)
        return values_of(outcome.output), tuple(found), outcome.pieces, layers.adapters()

    def _made(self, layers: ParallelLayers) -> nn.Module | str:
        """The layer under test, or the reason why this factory has none."""
        if self.case.lacks is None:
            return self.case.make(layers)
        try:
            layer = self.case.make(layers)
        except InputError as refusal:
            return f"it refuses: {refusal.what}"
        return self.case.lacks(layer) or layer

    def _try(
        self,
        layer: nn.Module,
        context: BuildContext,
        rank: Rank,
        like: Tensor | None,
        adapt: Callable[[Mapping[Parameter, ParamInfo]], None] = lambda _: None,
    ) -> Outcome:
        if missing := unspecified(layer):
            raise CheckFailed(
                f"{missing} has no parameter_specs entry, which declares its initial values and how ranks split it"
            )
        layer.train(self.case.training)
        infos = prepare(context, [_OneLayer(layer)])
        initial = {parameter: values_of(parameter) for parameter in infos}
        initialise({parameter: replace(info, init=_RANDOM) for parameter, info in infos.items()}, _SEED)
        adapt(infos)
        output, input_gradients = self._pass(layer, rank, like)
        first = {parameter: values_of(main_grad(parameter)) for parameter in infos}
        with context.gradients.deferring((0, 0)):
            self._pass(layer, rank, like)
        context.gradients.run_deferred((0, 0))
        return Outcome(output, input_gradients, dict(_pieces(infos, initial, first)))

    def _pass(self, layer: nn.Module, rank: Rank, like: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Forward and backward; each value of the whole output, shaped ``like`` the oracle's, has its own weight."""
        inputs = [rank.given(x, cut) for x, cut in zip(self.case.inputs, self.case.cuts, strict=True)]
        with nullcontext() if self.case.learns else torch.no_grad():
            output: Tensor = layer(*inputs)
        shape = (output if like is None else like).shape
        weights = torch.linspace(-1, 1, shape.numel(), dtype=torch.float64).view(shape)
        gradient = self.case.leaves(weights, rank.member).to(output)
        if output.shape != gradient.shape:
            raise CheckFailed(f"output is {list(output.shape)}, expected {list(gradient.shape)}")
        if self.case.learns:
            output.backward(gradient)
        return output.detach(), tuple(None if x is None else x.grad for x in inputs)

    def judge(self, found: Mapping[Member, Any], tolerance: float) -> str | None:
        """Compare every rank's results with the same part of the oracle's."""
        lacking = {member: reason for member, reason in found.items() if isinstance(reason, str)}
        if lacking:
            member, reason = next(iter(lacking.items()))
            if len(lacking) < len(found):
                raise CheckFailed(f"only some ranks have it; on {member}: {reason}")
            return reason
        self._compare(found, tolerance)
        return None

    def _compare(self, found: Mapping[Member, Any], tolerance: float) -> None:
        _, _, some, adapters = next(iter(found.values()))
        expected = self.expected(adapters, some)
        for member, (output, of_inputs, pieces, _) in found.items():
            if sorted(pieces) != (names := sorted(expected.pieces)):
                raise CheckFailed(f"logical tensors on {member} are {sorted(pieces)}, expected {names}")
            self._judge_output(member, output, expected.output, tolerance)
            for index, (gradient, whole) in enumerate(zip(of_inputs, expected.input_gradients, strict=True)):
                if whole is not None:
                    part = values_of(self.case.cuts[index](whole, member))
                    compare_values(f"gradient of input {index} on {member}", gradient, part, tolerance)
        for name, piece in sorted(expected.pieces.items()):
            of_ranks = {member: pieces[name] for member, (_, _, pieces, _) in found.items()}
            self._judge_tensor(name, piece, of_ranks, tolerance)

    def _judge_output(self, member: Member, output: Values, whole: Tensor, tolerance: float) -> None:
        expected = values_of(self.case.leaves(whole, member))
        stops = np.cumsum([part.features // member.size for part in self.case.parts])
        names = [f"output of {part.name}" for part in self.case.parts] or ["output"]
        pairs = zip(np.split(output, stops[:-1], -1), np.split(expected, stops[:-1], -1), strict=True)
        for name, (found, wanted) in zip(names, pairs, strict=True):
            compare_values(f"{name} on {member}", found, wanted, tolerance)

    def _judge_tensor(self, name: str, expected: Piece, pieces: Mapping[Member, Piece], tolerance: float) -> None:
        """Compare initial values and gradients by piece; the pieces must cover the tensor, each value counted once."""
        times = np.zeros(expected.part.shape)
        for member, piece in pieces.items():
            if (piece.part.shape, piece.decay) != (expected.part.shape, expected.decay):
                raise CheckFailed(
                    f"{name} on {member}: shape {piece.part.shape}, decay {piece.decay}, expected "
                    f"{expected.part.shape}, {expected.decay}"
                )
            if expected.initial is not None:
                compare_values(f"initial {name} on {member}", piece.initial, expected.initial[piece.box], tolerance)
            gradient, both = _summed(name, piece, pieces)
            compare_values(f"gradient of {name} on {member}", gradient, expected.gradient[piece.box], tolerance)
            after = f"gradient of {name} after a whole and a split backward on {member}"
            compare_values(after, both, 2 * expected.gradient[piece.box], tolerance)
            times[piece.box] += piece.counted
        if (times != 1).any():
            member = next(iter(pieces))
            where = ", ".join(map(str, np.argwhere(times != 1)[0]))
            raise CheckFailed(
                f"{name} over {member.size} ranks{', sequence split' * member.sequence}: its value [{where}] is "
                f"counted {times[times != 1][0]:g} times, expected once"
            )


class _OneLayer(nn.Module):
    """A chunk of one layer, which gives the layer a name in the tree."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        """Run the layer."""
        return ChunkOut(self.layer(x))

    def segments(self) -> tuple[Segment, ...]:
        """No segments: the layer is called directly."""
        return ()


def _pieces(
    infos: Mapping[Parameter, ParamInfo], initial: Mapping[Parameter, Values], gradients: Mapping[Parameter, Values]
) -> Iterator[tuple[str, Piece]]:
    for parameter, info in infos.items():
        both = values_of(main_grad(parameter))
        for part in info.parts:
            rows = slice(part.local.start, part.local.stop)
            first, one, two = (values[rows] for values in (initial[parameter], gradients[parameter], both))
            yield part.name, Piece(part, first, one, two, info.partial_over == "tensor", info.counted, info.decay)


def _summed(name: str, piece: Piece, pieces: Mapping[Member, Piece]) -> tuple[Values, Values]:
    """Both gradients of ``piece``, summed over the ranks if they are partial."""
    if not piece.partial:
        return piece.gradient, piece.both
    for member, other in pieces.items():
        if (other.box, other.partial) != (piece.box, True):
            raise CheckFailed(
                f"{name} declares a gradient that is partial over tensor, but {member} holds another piece"
            )
    return sum(p.gradient for p in pieces.values()), sum(p.both for p in pieces.values())  # type: ignore[return-value]  # there is one


def compare_values(what: str, found: Values | None, expected: Values, tolerance: float) -> None:
    """Raise :class:`CheckFailed` unless ``found`` is ``expected`` within ``tolerance``, relative and absolute."""
    if found is None or found.shape != expected.shape:
        shape = None if found is None else list(found.shape)
        raise CheckFailed(f"{what} is {shape}, expected {list(expected.shape)}")
    wrong = ~np.isclose(found, expected, rtol=tolerance, atol=tolerance)
    if wrong.any():
        first = tuple(map(int, np.argwhere(wrong)[0]))
        raise CheckFailed(
            f"{what}: {wrong.sum()} of {wrong.size} values differ, the first at {list(first)}, {found[first]:.6g}, "
            f"expected {expected[first]:.6g}"
        )


def values_of(x: Tensor) -> Values:
    """``x`` in float64, as it is sent to another process."""
    return x.detach().double().cpu().numpy().copy()
