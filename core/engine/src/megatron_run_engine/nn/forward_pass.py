"""What layers say that a forward runs in, around a whole chunk or around a segment that runs by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from megatron_run.contracts import ParallelLayers, Segment


class ForwardPass:
    """Enters ``layers.forward_pass()``, once however deep: a chunk calls this around its forward.

    Its segments go through :meth:`around`, since they also run outside of it: when a graph is captured, and when a
    layer is computed again in the backward. There they would compute something else, and nothing would say so.
    """

    def __init__(self, layers: ParallelLayers) -> None:
        self._enter: Callable[[], AbstractContextManager[object]] = layers.forward_pass
        self._within = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within: what the layers set up is there."""
        if self._within:
            yield
            return
        self._within = True
        try:
            with self._enter():
                yield
        finally:
            self._within = False

    def around(self, segment: Segment) -> Segment:
        """``segment``, which runs in a forward pass of its own wherever no chunk has begun one."""

        def run(*tensors: Any) -> Any:
            with self():
                return segment.fn(*tensors)

        return replace(segment, fn=run)
