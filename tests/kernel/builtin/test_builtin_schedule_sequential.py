import pytest

from megatron_run.builtin.schedule.sequential import Sequential, megatron_run_plugin_info
from megatron_run.errors import ScheduleError
from megatron_run.pipeline.verify import verify
from tests.support.random_schedules import looped_spec


def test_each_microbatch_goes_forward_and_back_before_the_next() -> None:
    (actions,) = Sequential().actions(looped_spec(1, 1, 3))
    assert [str(action) for action in actions] == ["F0.0", "B0.0", "F1.0", "B1.0", "F2.0", "B2.0"]
    plan = verify(looped_spec(1, 1, 3), [actions])
    assert plan.peak_in_flight == (1,)
    assert plan.ascending


@pytest.mark.parametrize(
    ("stages", "chunks", "instead"), [(2, 1, "1f1b"), (1, 2, "interleaved"), (2, 2, "interleaved")]
)
def test_stages_and_chunks_are_refused_with_the_schedule_that_serves_them(
    stages: int, chunks: int, instead: str
) -> None:
    with pytest.raises(ScheduleError, match=f"choose --plugin schedule={instead}"):
        Sequential().actions(looped_spec(stages, chunks, 2))


def test_it_serves_no_parallel_size() -> None:
    assert not megatron_run_plugin_info().provides
