"""Transformer Engine's ``make_graphed_callables``, and what surrounds its captures. Only this module imports it.

The library takes neither the generators to register with its graphs nor the error mode of its captures as arguments;
:class:`Engine` arranges both around the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_run_engine.runtime import Need, import_transformer_engine

#: The oldest release that shares buffers between graphs, so that memory does not grow with microbatches.
MINIMUM = "2.7"
NEED = Need(
    plugin="graph-capture=te",
    distribution="megatron-run-graph-capture-te",
    minimum=MINIMUM,
    reason=f"{MINIMUM} is the first whose graphs share their buffers",
    instead="choose --plugin graph-capture=partial",
)


@dataclass(frozen=True)
class Engine:
    """The (untyped) ``make_graphed_callables``, and the module ``transformer_engine.pytorch.distributed``."""

    make_graphed_callables: Callable[..., Any]
    distributed: Any

    @contextmanager
    def registering(self, generators: Sequence[torch.Generator]) -> Iterator[None]:
        """Within: every graph registers ``generators``, besides the device's default one, which each registers itself.

        A kernel that draws from another generator ends the capture.
        """
        before = self.distributed.get_all_rng_states()
        named = {f"megatron-run-{number}": generator for number, generator in enumerate(generators)}
        self.distributed.set_all_rng_states({**before, **named})
        try:
            yield
        finally:
            self.distributed.set_all_rng_states(before)


@contextmanager
def captures_of_one_thread() -> Iterator[None]:
    """Within: ``torch.cuda.graph`` lets other threads do what a capture forbids.

    By default it forbids it to all: a thread that saves a checkpoint in the background waits for events and pins
    memory, which would end the capture and raise in that thread. The library has no argument for it.
    """
    before = torch.cuda.graph
    torch.cuda.graph = partial(before, capture_error_mode="thread_local")  # type: ignore[misc, assignment]  # a class
    try:
        yield
    finally:
        torch.cuda.graph = before  # type: ignore[misc]  # a class


def find_engine(device: torch.device) -> Engine:
    """The library, for graphs on ``device``. Raises as :func:`import_transformer_engine`."""
    library, distributed = import_transformer_engine(
        NEED, device, "transformer_engine.pytorch", "transformer_engine.pytorch.distributed"
    )
    return Engine(library.make_graphed_callables, distributed)
