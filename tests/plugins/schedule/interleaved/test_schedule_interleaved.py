from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from megatron_run.contracts.schedule import ScheduleSpec, signed_order
from megatron_run.errors import ScheduleError
from megatron_run.pipeline.simulate import timeline, timeline_text
from megatron_run.pipeline.verify import verify
from megatron_run_schedule_interleaved import Interleaved, Options
from megatron_run_testing import Check
from megatron_run_testing.schedule import schedule_checks
from tests.support.checkout import ROOT
from tests.support.random_schedules import looped_spec


def warmup(stage: int, spec: ScheduleSpec, group: int = 0) -> int:
    total = spec.microbatches * spec.chunks
    return min(2 * (spec.stages - stage - 1) + (spec.chunks - 1) * (group or spec.stages), total)


def shapes() -> Iterator[tuple[int, int, int, int]]:
    """(P, V, M, G) that the schedule must accept, remainder groups included."""
    for stages in (2, 3, 4, 6):
        for chunks in (2, 3, 4):
            for group in (stages, stages + 1, 2 * stages):
                for microbatches in range(group, 3 * group + 1):
                    rest = microbatches % group
                    if rest == 0 or rest >= stages:
                        yield stages, chunks, microbatches, group


def closed_visit(k: int, chunks: int, microbatches: int, group: int) -> tuple[int, int]:
    """(microbatch, chunk) of the k-th forward, by division alone."""
    first = k // (group * chunks) * group
    size = min(group, microbatches - first)
    chunk, within = divmod(k - first * chunks, size)
    return first + within, chunk


def closed_order(stage: int, stages: int, chunks: int, microbatches: int, group: int) -> list[tuple[str, int, int]]:
    """Forward i, then backward i - warm-up as soon as there is one, then the rest."""
    total = microbatches * chunks
    ahead = min(2 * (stages - stage - 1) + (chunks - 1) * group, total)
    order = []
    for i in range(total + ahead):
        if i < total:
            order.append(("F", *closed_visit(i, chunks, microbatches, group)))
        if i >= ahead:
            microbatch, chunk = closed_visit(i - ahead, chunks, microbatches, group)
            order.append(("B", microbatch, chunks - 1 - chunk))
    return order


def test_the_order_equals_its_closed_formula_on_the_grid() -> None:
    configurations = 0
    for stages, chunks, microbatches, group in shapes():
        lists = Interleaved(group).actions(looped_spec(stages, chunks, microbatches))
        for stage, actions in enumerate(lists):
            assert list(actions) == closed_order(stage, stages, chunks, microbatches, group)
            configurations += 1
    assert configurations >= 400


def test_rank_0_of_four_stages_two_chunks_eight_microbatches() -> None:
    # The listing that Megatron-LM's documentation of the schedule table leads to, as signed integers.
    warm = [1, 1, 1, 1, 2, 2, 2, 2, 1, 1]
    steady = [1, -2, 1, -2, 2, -2, 2, -2, 2, -1, 2, -1]
    cool = [-1, -1, -2, -2, -2, -2, -1, -1, -1, -1]
    assert signed_order(Interleaved(4).actions(looped_spec(4, 2, 8))[0]) == warm + steady + cool


def test_the_group_is_the_number_of_stages_unless_told_otherwise() -> None:
    assert Interleaved().actions(looped_spec(3, 2, 6)) == Interleaved(3).actions(looped_spec(3, 2, 6))
    assert Interleaved().actions(looped_spec(3, 2, 6)) != Interleaved(6).actions(looped_spec(3, 2, 6))


def test_every_shape_verifies_and_memory_equals_the_formula() -> None:
    for stages, chunks, microbatches, group in shapes():
        asked = looped_spec(stages, chunks, microbatches)
        plan = verify(asked, Interleaved(group).actions(asked))
        total = microbatches * chunks
        assert plan.ascending
        assert plan.peak_in_flight == tuple(min(warmup(p, asked, group) + 1, total) for p in range(stages))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_bubble_shrinks_by_the_number_of_chunks(stages: int, chunks: int, groups: int) -> None:
    asked = looped_spec(stages, chunks, groups * stages)
    drawn = timeline(verify(asked, Interleaved().actions(asked)))
    bubble_over_ideal = (stages - 1) / (chunks * asked.microbatches)
    assert drawn.bubble_fraction == pytest.approx(bubble_over_ideal / (1 + bubble_over_ideal), abs=1e-12)


@pytest.mark.parametrize(("stages", "chunks", "key"), [(1, 2, "parallel.pipeline"), (2, 1, "parallel.chunks")])
def test_one_stage_or_one_chunk_is_refused_and_1f1b_suggested(stages: int, chunks: int, key: str) -> None:
    with pytest.raises(ScheduleError, match=rf"needs {key} of at least 2, got 1.*--plugin schedule=1f1b"):
        Interleaved().actions(looped_spec(stages, chunks, 4))


@pytest.mark.parametrize(
    ("stages", "microbatches", "group", "nearest"),
    [(4, 6, None, "4 or 8"), (4, 1, None, "4"), (2, 3, None, "2 or 4"), (4, 12, 9, "9 or 13"), (2, 3, 5, "5")],
)
def test_microbatches_that_do_not_fit_are_refused_with_the_nearest_that_do(
    stages: int, microbatches: int, group: int | None, nearest: str
) -> None:
    with pytest.raises(ScheduleError, match=rf"cannot run {microbatches} .* there are {nearest} microbatches"):
        Interleaved(group).actions(looped_spec(stages, 2, microbatches))
    for fits in nearest.split(" or "):
        Interleaved(group).actions(looped_spec(stages, 2, int(fits)))


def test_a_group_smaller_than_the_stages_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"group_size=2 is smaller than the 4 pipeline stages; set .* to 4 or more"):
        Interleaved(2).actions(looped_spec(4, 2, 8))


def test_options_are_checked() -> None:
    with pytest.raises(ValidationError):
        Options(group_size=0)
    assert Options().group_size is None


def test_the_readme_shows_the_real_timeline() -> None:
    asked = looped_spec(4, 2, 8)
    readme = (ROOT / "plugins/schedule/interleaved/README.md").read_text(encoding="utf-8")
    assert timeline_text(timeline(verify(asked, Interleaved().actions(asked)))) in readme


@pytest.mark.parametrize(
    "check",
    schedule_checks(
        Interleaved(),
        warmup=warmup,
        in_flight=lambda stage, asked: warmup(stage, asked) + 1,
        bubble=lambda asked: (asked.stages - 1) / (asked.chunks * asked.microbatches),
        ascending=True,
    ),
    ids=lambda check: check.name,
)
def test_it_conforms(check: Check) -> None:
    check.run()
