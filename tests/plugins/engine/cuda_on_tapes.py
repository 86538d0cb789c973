"""``torch.cuda``'s graphs, streams and generators in CPU memory, for libraries that are told that there is a device.

A graph records and replays as a tape of ``graph-capture=partial`` does, and holds what a CUDA graph holds. So what a
library does with graphs can be tried without a device, with its own code and real numbers, within the memory of a
:class:`tests.support.device_memory.Device`.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_run_engine.capture.graphs import weak_alias
from tests.plugins.device_graphs import DeviceTape, Pool


class TapeGraph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.generators = [torch.default_generator]
        self.tape = DeviceTape(())
        self.replays = 0

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def check_generators(self) -> None:
        """Raise what PyTorch raises when a kernel draws from a generator that the graph does not know."""
        known = [_identity(generator) for generator in self.generators]
        for operation in self.tape.operations:
            for value in tree_leaves((operation.args, dict(operation.kwargs))):
                if isinstance(value, torch.Generator) and _identity(value) not in known:
                    raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")

    def replay(self) -> None:
        self.replays += 1
        self.tape.replay()

    def reset(self) -> None:
        self.tape = DeviceTape(())


def _identity(generator: Any) -> int:
    """The same for every Python object of one generator: the dispatcher makes new ones."""
    number: int = generator._cdata
    return number


class Machine:
    """The device that is not there: ``graphs`` that were captured and in which error ``modes``."""

    def __init__(self) -> None:
        self.graphs: list[TapeGraph] = []
        self.modes: list[str] = []
        self.capturing = False

    @property
    def operations(self) -> int:
        """How many were recorded."""
        return sum(len(graph.tape.operations) for graph in self.graphs)


def pretend(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Let ``torch.cuda`` answer as if there were a device, an H100, whose memory is the host's."""
    machine = Machine()

    class Capture:
        """In the place of ``torch.cuda.graph``."""

        def __init__(self, graph: TapeGraph, pool: Pool, capture_error_mode: str = "global") -> None:
            self.graph, self.within = graph, graph.tape.capture(pool)
            machine.graphs.append(graph)
            machine.modes.append(capture_error_mode)

        def __enter__(self) -> None:
            machine.capturing = True
            self.within.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.within.__exit__(*error)
            machine.capturing = False
            if error[0] is None:
                self.graph.check_generators()

    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name, value in {
        "CUDAGraph": TapeGraph,
        "graph": Capture,
        "Stream": lambda *_: stream,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda *_: stream,
        "current_device": lambda: 0,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: machine.capturing,
        "synchronize": lambda *_: None,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(major=9, minor=0, multi_processor_count=132),
        "default_generators": [torch.default_generator],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return machine


def weak_refs(values: Any) -> Any:
    """In the place of ``make_weak_ref``, which leaves the CPU's tensors alone."""
    return tree_map_only(Tensor, weak_alias, values)
