"""The memory of a device on a CPU: what PyTorch's caching allocator does there that can hurt.

Every tensor that is made within :class:`Device` lies in one :class:`Memory`. What nobody holds is filled with NaN
before the next operation runs, and the next tensor that fits gets it: whoever still reads it sees NaN or a stranger's
values, and whoever still writes to it spoils a stranger. New memory holds NaN too. Weak aliases hold nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_run_engine.capture.graphs import weak_alias
from megatron_run_engine.capture.graphs.arena import Arena
from megatron_run_engine.capture.graphs.tape import WITHOUT_VALUES
from megatron_run_engine.runtime import tensors_in, with_tensors

#: Four or eight of these bytes are a NaN, or minus one.
POISON = 255
_lift = torch.ops.aten.lift_fresh.default


class Memory(Arena):
    """Blocks that are poisoned when they are free; ``freed`` hears of each, as an alias of its bytes."""

    def __init__(self, freed: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        self._heard = freed

    def _grow(self, size: int) -> Any:
        block = super()._grow(size)
        self._segments[-1].fill_(POISON)
        return block

    def _give_back(self, block: Any) -> None:
        place = self._segments[block.segment][block.start : block.start + block.size].fill_(POISON)
        if self._heard:
            self._heard(weak_alias(place))
        super()._give_back(block)


class Device(TorchDispatchMode):
    """Within: the results of all operations, forward and backward, lie in ``memory``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.memory = Memory()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not import the compiler only to disable it here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.memory.collect()
        result = func(*args, **(kwargs or {}))
        if _in_place(func):
            return result
        given = () if func is _lift else tensors_in((args, kwargs))
        storages = {x.untyped_storage()._cdata for x in given}

        def place(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            new = storage._cdata not in storages and storage.nbytes()  # a weak alias begins as a tensor without memory
            if not (new and type(tensor) is Tensor and tensor.device.type == "cpu"):
                return tensor
            moved = self.memory.like(tensor)
            return moved if func in WITHOUT_VALUES else moved.copy_(tensor)

        return with_tensors(result, place)


@cache
def _in_place(func: Any) -> bool:
    """Whether all results of ``func`` are arguments or views of them."""
    return func is not _lift and all(each.alias_info is not None for each in func._schema.returns)
