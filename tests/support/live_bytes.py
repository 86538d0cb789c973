"""How many bytes of tensors are alive at once, whatever the allocator keeps and the system maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_run_engine.estimate.step_memory import LiveBytes

#: Operators that give a tensor whose memory is a mapped file.
_MAPPED = frozenset({"aten::from_file"})


class MadeBytes(LiveBytes):
    """Mapped files add nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _MAPPED:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes of tensors that ``work`` made and that were alive together; views add nothing."""
    live = MadeBytes()
    with live:
        work()
    return live.peak
