from __future__ import annotations

import torch

from benchmarks.graph_capture.stage import Size, Stage, one_f_one_b


def test_a_captured_stage_gives_the_gradient_of_an_eager_one() -> None:
    actions = one_f_one_b(2, 3)
    eager, captured = Stage(Size(32, sequence=8)), Stage(Size(32, sequence=8))
    captured.x, captured.gradient = eager.x, eager.gradient
    assert captured.capture(actions).graphs == 2 * 2 * 3
    assert torch.equal(eager.run(actions, 1), captured.run(actions, 1))
