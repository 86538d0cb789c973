"""What is counted of a step on fake tensors is what lives in a real one; `benchmarks.planner --memory` compares 46."""

from __future__ import annotations

import pytest
import torch

from benchmarks.planner.configuration import Configuration, sized
from benchmarks.planner.memory import CONFIGURATIONS, live_bytes, planned_bytes
from megatron_run.config.request import Request
from megatron_run.contracts.schedule import Action
from megatron_run.pipeline.lower import Instruction, lower
from megatron_run_engine.estimate.step_memory import ChunkBytes, walk
from megatron_run_planner.schedules import Schedules
from tests.support.interpreted import interpreted


def check(configuration: Configuration) -> None:
    (planned,) = planned_bytes(configuration.request)
    assert planned == pytest.approx(live_bytes(configuration.request.to_json()), rel=0.005), configuration.name


def test_the_peak_of_a_step_is_what_was_counted() -> None:
    check(Configuration(1, (), {"model.num_layers": 1, "model.dropout": 0.1, "train.recompute": "mlp"}, sequence=64))


def interpreted_bytes(request: str) -> tuple[int, int]:
    """Planned and live bytes where Triton's interpreter runs a GPU's kernels on the CPU."""
    (planned,) = planned_bytes(Request.from_json(request))
    return planned, live_bytes(request)


@pytest.mark.multiproc
def test_the_peak_with_the_kernels_of_a_gpu_is_what_was_counted() -> None:
    small = {**sized(64, 4, 16, batch=2, layers=1), "data.vocab_size": 2000}  # more takes the interpreter seconds
    request = Configuration(1, (), small, sequence=16).request
    planned, live = interpreted(interpreted_bytes, request.to_json())
    assert planned == pytest.approx(live, rel=0.01)  # a tenth less than with another tensor for the logits' gradient
    # Beside the kernels a GPU has one for its attention, where a CPU multiplies and keeps the scores.
    assert planned_bytes(request, gpu=True)[0] == pytest.approx(planned, rel=0.005)
    assert planned_bytes(request)[0] > 1.1 * planned


@pytest.mark.parametrize(
    ("ranks", "gpus", "taken"),
    [
        (1, 1, True),
        (2, 1, False),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((1, 0, False), (2, 2, True))),
    ],
)
def test_a_run_that_names_no_device_is_counted_for_the_one_that_it_would_get(
    ranks: int, gpus: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    sets = {"model.num_layers": 1, "data.vocab_size": 2000, "parallel.data": ranks}
    on_cpu = Configuration(ranks, (), sets, sequence=32).request
    unnamed = Configuration(ranks, (), {**sets, "run.device": "auto"}, sequence=32).request
    assert planned_bytes(unnamed) == planned_bytes(on_cpu, gpu=taken) != planned_bytes(on_cpu, gpu=not taken)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "configuration", [each for each in CONFIGURATIONS if each.ranks == 1], ids=lambda each: each.name
)
def test_the_peak_of_every_kind_of_step_is_what_was_counted(configuration: Configuration) -> None:
    check(configuration)


def test_microbatches_in_flight_and_messages_add_up() -> None:
    """1F1B over two stages: two microbatches in flight on the first, each of 100 bytes; messages of 7 and 5."""
    size = ChunkBytes(kept=100, waiting=0, forward=120, alone=0, backward=30, input=0, weight=0, out=7, back=0)
    plan = Schedules().plan("1f1b", 2, 2, 1, 4)
    told = walk(lower(plan, 0, 1), [size], 1)
    assert told["activations"] + told["temporaries"] == 2 * 100 + 30 + 4
    last = walk(lower(plan, 1, 1), [size._replace(out=0, back=7)], 0)
    assert last["activations"] == 100 + 7
    assert last["temporaries"] == 30
    assert last["communication"] >= 7


def test_a_split_backward_keeps_what_waits_for_w() -> None:
    size = ChunkBytes(kept=100, waiting=60, forward=120, alone=0, backward=0, input=50, weight=10, out=0, back=0)
    plan = Schedules().plan("zero-bubble", 2, 2, 1, 4)
    most, held = 0, 0
    for action in plan.lists[1]:
        taken = {"F": 120, "I": 50, "W": 10}.get(action.op, 0)
        most = max(most, held + taken)
        held += {"F": 100, "I": -40, "W": -60}.get(action.op, 0)
    told = walk(lower(plan, 1, 1), [size], 0)
    assert told["activations"] + told["temporaries"] == most


def peak(actions: str, *kept: int) -> int:
    """Of ``actions`` on one stage without messages; a backward takes 5 bytes for itself, a forward what it keeps."""
    program = [Instruction((), None, Action.parse(word), None, (), False, False) for word in actions.split()]
    sizes = [ChunkBytes(size, 0, forward=size, alone=0, backward=5, input=0, weight=0, out=0, back=0) for size in kept]
    return sum(walk(program, sizes, 0).values())


def test_chunks_count_by_their_own_size_and_recomputed_ones_from_r_to_b() -> None:
    assert peak("F0.0 F1.0 F0.1 B0.1 B0.0 B1.0", 10, 100) == 10 + 10 + 100 + 5
    assert peak("F0.0 F1.0 R0.0 B0.0 R1.0 B1.0", 10) == 10 + 5
