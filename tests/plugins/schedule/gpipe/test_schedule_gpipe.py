from itertools import product

import pytest

from megatron_run.contracts.schedule import ScheduleSpec, signed_order
from megatron_run.pipeline.simulate import timeline, timeline_text
from megatron_run.pipeline.verify import verify
from megatron_run.planning import load_config
from megatron_run_schedule_gpipe import GPipe
from megatron_run_testing import Check
from megatron_run_testing.schedule import schedule_checks
from tests.support.checkout import ROOT
from tests.support.random_schedules import looped_spec

SHAPES = list(product((1, 2, 3, 4, 8), (1, 2, 3), (1, 2, 3, 4, 7, 8)))


def everything(stage: int, spec: ScheduleSpec) -> int:
    return spec.chunks * spec.microbatches


def closed_action(k: int, chunks: int, microbatches: int) -> str:
    """The k-th action of any stage, by division alone."""
    total = chunks * microbatches
    chunk, microbatch = divmod(k % total, microbatches)
    return f"F{microbatch}.{chunk}" if k < total else f"B{microbatch}.{chunks - 1 - chunk}"


def test_the_order_equals_its_closed_formula_on_the_grid() -> None:
    ranks = 0
    for stages, chunks, microbatches in SHAPES:
        expected = [closed_action(k, chunks, microbatches) for k in range(2 * chunks * microbatches)]
        for actions in GPipe().actions(looped_spec(stages, chunks, microbatches)):
            assert [str(action) for action in actions] == expected
            ranks += 1
    assert ranks == 324


def test_a_run_may_ask_for_stages_and_chunks() -> None:
    sets = {"parallel.pipeline": 2, "parallel.chunks": 2, "model.num_layers": 4}
    run = load_config("preset:tiny", plugins=["schedule=gpipe"], sets=sets)
    plan = run.plans[max(run.plans)]
    assert (plan.stages, plan.chunks) == (2, 2)


def test_two_chunks_by_hand() -> None:
    first, second = GPipe().actions(looped_spec(2, 2, 3))
    assert signed_order(first) == signed_order(second) == [1, 1, 1, 2, 2, 2, -2, -2, -2, -1, -1, -1]


def test_everything_is_in_flight_and_gradients_come_in_order() -> None:
    for shape in SHAPES:
        asked = looped_spec(*shape)
        plan = verify(asked, GPipe().actions(asked))
        assert plan.ascending
        assert plan.peak_in_flight == (asked.chunks * asked.microbatches,) * asked.stages


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_bubble_equals_its_formula_with_at_least_as_many_microbatches_as_stages(stages: int, chunks: int) -> None:
    for microbatches in (stages, stages + 1, 8):
        asked = looped_spec(stages, chunks, microbatches)
        drawn = timeline(verify(asked, GPipe().actions(asked)))
        expected = (stages - 1) / (chunks * microbatches + stages - 1)
        assert drawn.bubble_fraction == pytest.approx(expected, abs=1e-12)


def test_the_readme_shows_the_real_timeline() -> None:
    asked = looped_spec(4, 1, 8)
    readme = (ROOT / "plugins/schedule/gpipe/README.md").read_text(encoding="utf-8")
    assert timeline_text(timeline(verify(asked, GPipe().actions(asked)))) in readme


def over_ideal(asked: ScheduleSpec) -> float | None:
    """Of as many microbatches as stages or more."""
    whole = asked.microbatches >= asked.stages
    return (asked.stages - 1) / (asked.chunks * asked.microbatches) if whole else None


@pytest.mark.parametrize(
    "check",
    schedule_checks(GPipe(), warmup=everything, in_flight=everything, bubble=over_ideal, ascending=True),
    ids=lambda check: check.name,
)
def test_it_conforms(check: Check) -> None:
    check.run()
