"""The rules of capture: what a recorded function must not do, in any backend.

A replay runs kernels and no Python. So no value may be read on the host, no shape may depend on data, no data may be
uploaded from the host, and only kernels may draw random numbers. During a CUDA capture a violation either raises an
error without the operation's name, or silently gives wrong results. Here it is found before, by name, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakSet

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_run.errors import GraphCaptureError
from megatron_run_engine.runtime.operands import tensors_in
from megatron_run_engine.runtime.segments import without_values

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import Region, Segment
    from megatron_run_engine.runtime.gradients import GradientAccumulator


_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")
_SHOWS = ("__contains__", "__repr__", "__format__")
#: Methods that read values on the host. On a CPU some of them never reach the dispatcher.
_HOST_READS: Mapping[Any, str] = MappingProxyType({getattr(Tensor, name): name for name in (*_READS, *_SHOWS)})
_aten = torch.ops.aten
_MASKED_WRITES = (_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
_DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class BrokenRule(Exception):
    """An operation that a graph cannot record. Its text continues "segment x cannot be captured: its forward"."""


@contextmanager
def blamed(who: str, where: str) -> Iterator[None]:
    """Turn a broken rule within into a :class:`GraphCaptureError` that names ``who`` and the pass ``where``."""
    try:
        yield
    except BrokenRule as broken:
        raise GraphCaptureError(
            f"{who} cannot be captured",
            why=f"its {where} {broken}",
            fix="leave it out of graph-capture.scope, or let it work on the device alone",
        ) from broken


@contextmanager
def refusing_breaks() -> Iterator[None]:
    """Turn a broken rule of a whole step, outside of its segments, into a :class:`GraphCaptureError`."""
    try:
        yield
    except BrokenRule as broken:
        raise GraphCaptureError(
            "the step cannot be captured whole",
            why=f"what runs between its segments {broken}",
            fix="name segments in graph-capture.scope instead of step",
        ) from broken


class _NoHostReads(TorchFunctionMode):
    """Refuses methods that read a tensor's values without an operation that the dispatcher sees."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HOST_READS:
            raise BrokenRule(f"reads a tensor on the host: Tensor.{_HOST_READS[func]}()")
        if func is Tensor.to and any(isinstance(x, str) and x == "cpu" for x in (*args[1:], *kwargs.values())):
            raise BrokenRule("reads a tensor on the host: Tensor.to('cpu')")
        return func(*args, **kwargs)


#: Where a random stream stands: seed and offset on a GPU, the bits of its state on a CPU.
_Position = tuple[int, int] | bytes


class Rules(TorchDispatchMode):
    """Checks every operation within, forward or backward. The first one that breaks a rule raises.

    Operations do not write to tensors from outside, as in a CUDA capture: accumulation in place leaves no trace.
    ``generators`` are those that graphs register. On a CPU operations alone may advance them; on a GPU also kernels
    that do not go through the dispatcher, since a graph counts how far each registered generator was advanced.

    ``made`` are the storages that operations have allocated, ``read`` those that they were given. ``drew``: an
    operation advanced a generator.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._generators = generators
        self._positions = self._now()
        # Weak, since memory must be freed here when it is freed in an eager run; torch keeps a storage's Python object
        # as long as the storage.
        self.made, self.read = WeakSet[torch.UntypedStorage](), WeakSet[torch.UntypedStorage]()
        self.drew = False
        self._host = _NoHostReads()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not import the compiler, which takes seconds, only to disable it here."""
        return False

    def __enter__(self) -> Self:
        """Start checking."""
        self._host.__enter__()  # type: ignore[no-untyped-call]  # torch's
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop checking, after a check that no random stream was moved since the last operation."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        self._host.__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        if error[0] is None:
            self._check_streams()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # our own calls must not trip _NoHostReads
            self._check_streams()  # between operations nobody may move a stream: a replay runs operations only
            _check(func, args, kwargs)
            result = self.perform(func, args, kwargs)
            now = self._now()  # the operation itself may have drawn
            self.drew |= self._positions != now
            self._positions = now
        return result

    def perform(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an allowed operation."""
        self.read.update(_storages((args, kwargs)))
        if self.writes_outside(func, args, kwargs):
            return unwritten(func, args, kwargs)
        result = func(*args, **kwargs)
        # By storage, not by tensor: a write to a view of a new tensor is a write to the new tensor.
        self.made.update(_storages(result))
        return result

    def is_ours(self, tensor: Tensor) -> bool:
        """Whether the storage of ``tensor`` was allocated within."""
        return tensor.untyped_storage() in self.made

    def writes_outside(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether ``func`` does nothing but write to tensors from outside."""
        targets = written(func, args, kwargs)
        return bool(targets) and _only_aliases(func) and not any(self.is_ours(target) for target in targets)

    def _check_streams(self) -> None:
        """Raise if a random stream was seeded, restored, or advanced in a way that a replay does not repeat."""
        positions = self._now()
        for before, now in zip(self._positions, positions, strict=True):
            if not (before == now or _advanced(before, now)):
                raise BrokenRule(
                    "seeds or restores a random stream: a replay would not (a checkpoint that draws does both)"
                )
        self._positions = positions

    def _now(self) -> list[_Position]:
        return [_position(generator) for generator in self._generators]


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    return (x.untyped_storage() for x in tensors_in(values) if x.layout is torch.strided)


def _position(generator: torch.Generator) -> _Position:
    if generator.device.type == "cpu":
        return generator.get_state().numpy().tobytes()
    return generator.initial_seed(), generator.get_offset()


def _advanced(before: _Position, now: _Position) -> bool:
    """Whether a stream of a GPU went on under the same seed. A state of a CPU does not tell."""
    if isinstance(before, bytes) or isinstance(now, bytes):
        return False
    return before[0] == now[0] and before[1] <= now[1]


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that ``func`` writes to, from its schema."""
    written = (args[place] if place < len(args) else kwargs.get(name) for place, name in _written_places(func))
    return tensors_in(tuple(written))


@cache
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    """The position and name of each argument that ``func`` writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple((place, each.name) for place, each in arguments if each.alias_info and each.alias_info.is_write)


@cache
def _only_aliases(func: Any) -> bool:
    """Whether all that ``func`` returns are its arguments or views of them, or it returns nothing."""
    return all(returned.alias_info is not None for returned in func._schema.returns)


@cache
def _follows_data(func: Any) -> bool:
    """Whether ``func`` may wait for the host, or make a shape that depends on data."""
    return any(tag in func.tags for tag in _DATA_DEPENDENT)


def unwritten(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the results of ``func``, which only writes to its arguments, without running it."""
    targets = written(func, args, kwargs)
    returned = len(func._schema.returns)
    return None if returned == 0 else targets[0] if returned == 1 else tuple(targets)


def _check(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise :class:`BrokenRule` for an operation that involves the host."""
    if _follows_data(func) and not _is_static(func, args, kwargs):
        raise BrokenRule(f"waits for the host, or makes a shape that depends on data: {func}")
    if func in _MASKED_WRITES and _has_mask(args[1]):
        raise BrokenRule(f"writes through a boolean mask, which waits for the host: {func}; torch.where does not")
    if func is _aten.lift_fresh.default:
        raise BrokenRule("uploads data of the host: torch.tensor(); torch.full, zeros and arange do not")
    if func.namespace == "_c10d_functional":
        raise BrokenRule(f"uses a functional collective: {func}; those of torch.distributed are recorded")
    # Tensors without dimensions are scalars, which operations on any device accept from the CPU.
    devices = {x.device.type for x in tensors_in((args, kwargs)) if x.dim()}
    target = kwargs.get("device")
    if len(devices | ({torch.device(target).type} if target is not None and devices else set())) > 1:
        raise BrokenRule(f"copies between devices: {func}")


def _is_static(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of a possibly data-dependent operation has a static shape."""
    if func is _aten.index.Tensor:
        return not _has_mask(args[1])
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is not None
    return False


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


class Linted(NamedTuple):
    """The knowledge of a region before it is recorded.

    ``handed_over`` are the parameters whose layers submit their gradients to the accumulator: a replayed backward
    bypasses it for these. ``outputs`` are the region's outputs, without values. ``read`` is the memory from outside
    that its operations read or write: parameters, gradients, and tables that a module may replace in an eager run. A
    graph knows addresses only, so whoever replays it holds this memory.
    """

    handed_over: tuple[Parameter, ...]
    outputs: tuple[Tensor, ...]
    read: tuple[torch.UntypedStorage, ...]

    @property
    def has_backward(self) -> bool:
        """Whether any output can be differentiated."""
        return any(output.requires_grad for output in self.outputs)


def lint(
    region: Region,
    examples: Sequence[Tensor],
    device: torch.device,
    gradients: GradientAccumulator,
    generators: Sequence[torch.Generator],
) -> Linted:
    """Run each segment forward and backward on zeros like ``examples``, and check that it keeps the rules.

    Parameters, gradients and the random streams of ``generators`` are left unchanged. Raises
    :class:`GraphCaptureError` with the segment and the operation.
    """
    environment = dict(zip(region.inputs, (zeros_like(example, device) for example in examples), strict=True))
    inside = WeakSet(x.untyped_storage() for x in environment.values())
    read = WeakSet[torch.UntypedStorage]()
    with kept_streams(generators), gradients.recording() as handed_over:
        for segment in region.segments:
            inputs = [_leaf(environment[name]) for name in segment.inputs]
            outputs, passes = _try(segment, inputs, generators, alone=len(region.segments) == 1)
            environment.update(zip(segment.outputs, outputs, strict=True))
            for rules in passes:
                inside |= rules.made
                read |= rules.read
    outputs = tuple(without_values(environment[name]) for name in region.outputs)
    return Linted(tuple(handed_over), outputs, tuple(read - inside))


def zeros_like(example: Tensor, device: torch.device) -> Tensor:
    """Return zeros with the shape, strides, type and ``requires_grad`` of ``example``."""
    zeros = torch.empty_strided(example.size(), example.stride(), dtype=example.dtype, device=device).zero_()
    return zeros.requires_grad_(example.requires_grad)


@contextmanager
def kept_streams(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Restore the random streams of ``generators`` afterwards."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of ``inputs``, None where there is none, without accumulating any."""
    if not roots or not inputs:
        return [None] * len(inputs)
    # One level below torch.autograd.grad: that function is itself overridable, so a TorchFunctionMode such as
    # _NoHostReads is switched off while it runs.
    found = torch.autograd.graph._engine_run_backward(
        tuple(roots),
        tuple(gradients),
        False,  # keep_graph
        False,  # create_graph
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return list(found)


def _try(
    segment: Segment, inputs: Sequence[Tensor], generators: Sequence[torch.Generator], *, alone: bool
) -> tuple[tuple[Tensor, ...], tuple[Rules, Rules]]:
    """Run ``segment`` forward and backward; return its outputs, and the rules with what they have seen."""
    who = f"segment {segment.name} of layer {segment.layer}"
    with torch.enable_grad(), blamed(who, "forward"), Rules(generators) as forward:
        result = segment.fn(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    _check_outputs(segment, outputs)
    # An attention of another library advances a stream whether it draws or not; those that draw say so.
    if forward.drew and not segment.draws and not alone:
        raise GraphCaptureError(
            f"{who} draws random numbers and does not say so",
            why="the random streams are positioned once for all segments that are captured together",
            fix="set Segment.draws where the model makes it",
        )
    roots = [output for output in outputs if output.requires_grad]
    wanted = [x for x in (*inputs, *segment.params) if x.requires_grad]
    with blamed(who, "backward"), Rules(generators) as backward:
        run_backward(roots, [torch.zeros_like(root) for root in roots], wanted)
    return outputs, (forward, backward)


def _check_outputs(segment: Segment, outputs: Sequence[object]) -> None:
    others = [type(output).__name__ for output in outputs if not isinstance(output, Tensor)]
    if others or len(outputs) != len(segment.outputs):
        gives = f"it returns a value of type {others[0]}" if others else f"it returns {len(outputs)} tensors"
        raise GraphCaptureError(
            f"segment {segment.name} of layer {segment.layer} cannot be captured",
            why=f"{gives}, and declares {len(segment.outputs)}: {', '.join(segment.outputs)}; only tensors can cross",
            fix="leave it out of graph-capture.scope",
        )


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)
