import pytest

from megatron_run.contracts.schedule import LayoutSpec, looped_layout
from megatron_run.pipeline.plan import positions
from megatron_run.pipeline.verify import forward_plan
from tests.support.random_schedules import Layout, vee_layout


@pytest.mark.parametrize("layout", [looped_layout, vee_layout])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 7])
def test_every_stage_follows_one_common_order(layout: Layout, stages: int, chunks: int, microbatches: int) -> None:
    places = layout(LayoutSpec(stages, chunks, stages * chunks))
    plan = forward_plan(places, stages, chunks, microbatches)
    position_of = positions(places)
    for stage, actions in enumerate(plan.lists):
        keys = [(a.microbatch // stages, position_of[stage, a.chunk], a.microbatch) for a in actions]
        assert keys == sorted(keys)
        assert len(set(keys)) == chunks * microbatches
        assert {action.op for action in actions} == {"F"}
    assert len(plan.order) == stages * chunks * microbatches


def test_nothing_is_held_without_a_backward() -> None:
    plan = forward_plan(looped_layout(LayoutSpec(2, 2, 4)), 2, 2, 3)
    assert plan.peak_in_flight == plan.peak_pending_weights == (0, 0)
