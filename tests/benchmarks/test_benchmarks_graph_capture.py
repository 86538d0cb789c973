from __future__ import annotations

import torch

from benchmarks.graph_capture.stage import Size, Stage, one_f_one_b
from megatron_run.contracts.schedule import LayoutSpec, ScheduleSpec, looped_layout
from megatron_run_engine.capture import passes, shared_slots
from megatron_run_schedule_1f1b import OneForwardOneBackward


def test_the_actions_are_those_of_1f1b() -> None:
    for stages, microbatches in ((1, 3), (4, 4), (4, 16)):
        spec = ScheduleSpec(looped_layout(LayoutSpec(stages, 1, stages)), stages, 1, microbatches)
        assert one_f_one_b(stages, microbatches) == OneForwardOneBackward().actions(spec)[0]
        assert shared_slots(passes(one_f_one_b(stages, microbatches), 1)).count == min(stages, microbatches)


def test_a_captured_stage_gives_the_gradient_of_an_eager_one() -> None:
    actions = one_f_one_b(2, 3)
    eager, captured = Stage(Size(32, sequence=8)), Stage(Size(32, sequence=8))
    captured.x, captured.gradient = eager.x, eager.gradient
    assert captured.capture(actions).graphs == 2 * 2 * 3
    assert torch.equal(eager.run(actions, 1), captured.run(actions, 1))
