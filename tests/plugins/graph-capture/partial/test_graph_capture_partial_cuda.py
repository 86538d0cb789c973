"""The CUDA backend where there is no device: what it does with ``torch.cuda``, on a stand-in for it."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_run_engine.capture.graphs.cuda import CudaBackend


class Graph:
    """In the place of ``torch.cuda.CUDAGraph``; ``log`` is what was done with it, ``broken`` whether its end fails."""

    broken = False

    def __init__(self) -> None:
        self.log: list[str] = []
        self.generators: list[torch.Generator] = []
        self.forbids = ""  # calls that a capture does not survive, of all threads or of its own

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def capture_begin(self, pool: Any, capture_error_mode: str = "global") -> None:
        self.log.append(f"begin in {pool}")
        self.forbids = capture_error_mode

    def capture_end(self) -> None:
        self.log.append("end")
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    def reset(self) -> None:
        self.log.append("reset")
        if self.broken:
            raise RuntimeError("there is nothing to reset")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The stand-ins that were made."""
    found: list[Graph] = []

    def graph() -> Graph:
        found.append(Graph())
        return found[-1]

    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name, value in {
        "CUDAGraph": graph,
        "Stream": lambda _: stream,
        "stream": nullcontext,
        "current_stream": lambda _: stream,
        "synchronize": lambda _: None,
        "memory_reserved": lambda _: 0,
        "default_generators": [torch.default_generator],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return found


def backend() -> CudaBackend:
    return CudaBackend(torch.device("cuda", 0), [torch.default_generator])


def test_what_runs_within_is_recorded_in_the_pool_while_the_garbage_collector_rests(made: list[Graph]) -> None:
    with backend().graph().capture("a pool"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert [graph.log for graph in made] == [["begin in a pool", "end"]]


def test_a_graph_knows_every_stream_but_the_default_one_which_it_registers_itself(made: list[Graph]) -> None:
    streams = torch.default_generator, torch.Generator()
    CudaBackend(torch.device("cuda", 0), streams).graph()
    assert [graph.generators for graph in made] == [[streams[1]]]


def test_what_other_threads_do_meanwhile_is_their_own_affair(made: list[Graph]) -> None:
    """A checkpoint may be written behind training, by a thread that waits for events and pins memory."""
    with backend().graph().capture("a pool"):
        pass
    assert [graph.forbids for graph in made] == ["thread_local"]


@pytest.mark.parametrize("broken", [False, True])
def test_an_error_within_is_the_one_that_is_told_and_leaves_the_graph_empty(
    broken: bool, made: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graph, "broken", broken)
    with pytest.raises(ValueError, match="the error of the layer"), backend().graph().capture("a pool"):
        raise ValueError("the error of the layer")
    assert gc.isenabled()
    assert [graph.log for graph in made] == [["begin in a pool", "end", "reset"]]


def test_a_capture_that_cannot_be_ended_is_an_error(made: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "broken", True)
    with pytest.raises(RuntimeError, match="a previous error"), backend().graph().capture("a pool"):
        """Nothing goes wrong that anybody sees."""
    assert gc.isenabled()
