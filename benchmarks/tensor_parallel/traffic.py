"""The bytes that a rank sends in a step, counted where torch starts its collectives, and the formula for them.

Legend: s sequence, b micro batch, h hidden, L layers, M microbatches, t ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.support.shape import Shape

#: An fp32 number.
ITEM = 4


def _bytes(given: Any) -> int:
    return sum(_bytes(each) for each in given) if isinstance(given, list | tuple) else int(given.nbytes)


#: A collective -> how often each byte of the whole tensor leaves a rank, in (t - 1) / t.
_PASSES = {"reduce": 2, "gather": 1, "scatter": 1}
#: Exchanges of rows, of which each rank sends others what it does -> the places of the rows and of how many go to each.
_EXCHANGES = {"c10d::alltoall_base_": (1, 4), "_c10d_functional::all_to_all_single": (0, 2)}
#: torch's operators: ``c10d`` is what the functions of torch.distributed call, ``_c10d_functional`` what DTensor calls.
#: Each with its kind, and the bytes of the whole tensor from (result, arguments).
_Whole = Callable[[Any, tuple[Any, ...]], int]
_COLLECTIVES: Mapping[str, tuple[str, _Whole]] = {
    "c10d::allreduce_": ("reduce", lambda _, given: _bytes(given[0])),
    "c10d::_allgather_base_": ("gather", lambda _, given: _bytes(given[0])),
    "c10d::_reduce_scatter_base_": ("scatter", lambda _, given: _bytes(given[1])),
    "_c10d_functional::all_reduce": ("reduce", lambda _, given: _bytes(given[0])),
    "_c10d_functional::all_reduce_": ("reduce", lambda _, given: _bytes(given[0])),
    "_c10d_functional::all_gather_into_tensor": ("gather", lambda result, _: _bytes(result)),
    "_c10d_functional::reduce_scatter_tensor": ("scatter", lambda _, given: _bytes(given[0])),
}
#: What only waits for a collective.
_WAITING = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")


class Traffic(TorchDispatchMode):
    """Within: ``sent`` grows by the bytes that each collective makes one of ``ranks`` send, at the least possible.

    All ranks of the process group take part in each collective. Raises :class:`ValueError` for a collective that it
    cannot count.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._ranks, self._parts = ranks, 0

    @property
    def sent(self) -> float:
        """Bytes, so far."""
        return self._parts / self._ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and count it; DTensors first become the collectives that they stand for."""
        from torch.distributed.tensor import DTensor  # half a second, the first time

        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "_schema", None) and func._schema.name
        if name and name.split("::")[0] in ("c10d", "_c10d_functional") and name not in _WAITING:
            self._parts += self._leaving(name, result, args)
        return result

    def _leaving(self, name: str, result: Any, given: tuple[Any, ...]) -> int:
        """The bytes that leave a rank, times the number of ranks."""
        if name in _EXCHANGES:
            rows, splits = (given[place] for place in _EXCHANGES[name])
            sent: list[int] = list(splits) or [len(rows) // self._ranks] * self._ranks
            sent[dist.get_rank()] = 0
            return self._ranks * sum(sent) * (_bytes(rows) // len(rows))
        if name not in _COLLECTIVES:
            raise ValueError(f"{name} is a collective of unknown size")
        kind, whole = _COLLECTIVES[name]
        return _PASSES[kind] * (self._ranks - 1) * whole(result, given)


def formula(shape: Shape, ranks: int, *, sequence: bool = False, overlap: bool = True) -> float:
    """The bytes that a rank sends in a step of split layers, without what lies under the collectives.

    Of each microbatch, all-reduces of s*b*h: 2 in the forward and 2 in the backward of each layer, 1 in the forward of
    the embedding and 1 in the backward of the output layer. The cross entropy sums two and compares one number of each
    token. With ``sequence`` an all-gather and a reduce-scatter take the place of each all-reduce, and the
    backward with ``overlap`` gathers the inputs of the 2L + 1 column layers again; once a step the gradients of norms,
    of row-parallel biases and of positions are summed.
    """
    layers, h = shape.layers, shape.hidden
    tokens = shape.sequence * shape.micro_batch * ITEM
    sums = (4 * layers + 2) * tokens * h + 3 * tokens
    gathers = (2 * layers + 1) * tokens * h if sequence and overlap else 0
    partial = ((2 * layers + 1) * 2 * h + 2 * layers * h + shape.sequence * h) * ITEM if sequence else 0
    parts = shape.microbatches * (_PASSES["reduce"] * sums + _PASSES["gather"] * gathers) + _PASSES["reduce"] * partial
    return parts * (ranks - 1) / ranks


def count(step: Callable[[], object], ranks: int) -> float:
    """The bytes that a rank sends in ``step``. Autograd runs a CPU's backward in the thread that asked for it."""
    traffic = Traffic(ranks)
    with traffic:
        step()
    return traffic.sent
