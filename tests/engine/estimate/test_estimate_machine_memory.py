"""Ranks that need more memory than the machine has are told of before a start; small ones are not counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from megatron_run.errors import ExitCode
from megatron_run.planning import ResolvedRun
from megatron_run_engine.estimate import machine_memory, model_size
from megatron_run_engine.launch import LaunchOptions, attempts
from tests.support.resolving import resolved

GIB = 2**30
#: 4 layers of 12 x 2048 x 2048: 0.2 billion parameters, of which each has 16 bytes with AdamW in fp32.
LARGE = ("model.hidden_size=2048", "model.num_heads=16", "model.tie_embeddings=true")


@contextmanager
def memory(size: float) -> Iterator[mock.Mock]:
    """A machine that has so many GiB."""
    counted = mock.Mock(wraps=model_size.model_size)
    with (
        mock.patch.object(machine_memory, "_memory", return_value=int(size * GIB)),
        mock.patch.object(model_size, "model_size", counted),
    ):
        yield counted


def run(*sets: str, nproc: int = 1, plugins: tuple[str, ...] = ()) -> ResolvedRun:
    return resolved(sets=sets, nproc=nproc, plugins=plugins)


@pytest.mark.parametrize(("optimizer", "each", "all_ranks"), [("adamw", 3.0, 12.0), ("zero1", 1.9, 7.5)])
def test_all_ranks_of_the_machine_are_counted_by_what_each_holds(optimizer: str, each: float, all_ranks: float) -> None:
    asked = run(*LARGE, "parallel.data=4", nproc=4, plugins=(f"optimizer={optimizer}",))
    with memory(all_ranks + 0.1):
        assert machine_memory.known_to_lack_memory(asked) == ""
    with memory(all_ranks - 0.1):
        found = machine_memory.known_to_lack_memory(asked)
    has = f"this machine has {all_ranks - 0.1:.1f} GiB"
    assert found == f"a rank needs {each} GiB, 4 of them {all_ranks} GiB, and {has}"


def test_a_small_model_is_not_built_to_be_counted() -> None:
    with memory(1) as counted:
        assert machine_memory.known_to_lack_memory(run()) == ""
    counted.assert_not_called()


def test_a_start_says_so_in_a_line_and_goes_on() -> None:
    lines: list[str] = []
    options = LaunchOptions(tell=lines.append)
    ended = mock.Mock(code=ExitCode.DONE, folder=None)
    with memory(2), mock.patch.object(attempts, "_attempt", return_value=ended) as started:
        attempts.start_local(run(*LARGE), options)
    assert lines == ["memory will not suffice: a rank needs 3.0 GiB, and this machine has 2.0 GiB"]
    started.assert_called_once()
