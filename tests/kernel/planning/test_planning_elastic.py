"""With how many of the ranks that are there a run trains: ``run.elastic``."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron_run.config.request import Request
from megatron_run.contracts.schema import ParallelSection, RampUp, TrainSection
from megatron_run.errors import RunError
from megatron_run.planning import ResolvedRun, resolve, to_yaml
from megatron_run.planning.batch_size import BatchSizes
from megatron_run.planning.elastic import data_sizes
from megatron_run.planning.resolver import as_typed, run_setting

TWELVE = {"run.elastic": "data", "train.global_batch_size": 12, "train.micro_batch_size": 1}


def on(there: int | None, nproc: int | None = None, plugins: tuple[str, ...] = (), **values: Any) -> ResolvedRun:
    sets = {key.replace("__", "."): value for key, value in values.items()}
    return resolve(Request(("preset:tiny",), plugins=plugins, values=TWELVE | sets, nproc=nproc, there=there))


def divides(train: TrainSection, data: int) -> bool:
    try:
        return bool(BatchSizes(train, data).all_microbatches())
    except RunError:
        return False


@pytest.mark.parametrize("ramp", [None, (4, 4), (8, 2), (24, 5)], ids=str)
@pytest.mark.parametrize(("batch", "micro"), [(24, 1), (24, 2), (24, 5), (36, 3), (7, 1)])
def test_the_sizes_are_those_whose_every_batch_divides(batch: int, micro: int, ramp: tuple[int, int] | None) -> None:
    """By trying each size with the class that deals the batches of a run."""
    grows = None if ramp is None else RampUp(start=min(ramp[0], batch), increment=ramp[1], samples=100)
    train = TrainSection(steps=10_000, global_batch_size=batch, micro_batch_size=micro, ramp_up=grows)
    if grows is not None and (batch - grows.start) % grows.increment:
        pytest.skip("no such ramp")
    for tensor, context, pipeline, expert in product((1, 2), (1, 2), (1, 3), (1, 2)):
        parallel = ParallelSection(tensor=tensor, context=context, pipeline=pipeline, expert=expert)
        unit = tensor * context * pipeline
        for most, least in product((1, 2, 5, 8, 64), (1, 4)):
            expected = [
                data
                for data in range(most // unit, 0, -1)
                if data % expert == 0 and unit * data >= least and divides(train, data)
            ]
            assert list(data_sizes(parallel, train, most, least)) == expected


@pytest.mark.parametrize(
    ("there", "data", "spares"), [(1, 1, 0), (2, 2, 0), (5, 4, 1), (7, 6, 1), (11, 6, 5), (12, 12, 0), (100, 12, 88)]
)
def test_the_most_ranks_train_over_which_the_batch_divides_and_the_batch_stays(
    there: int, data: int, spares: int
) -> None:
    run = on(there)
    assert (run.sizes.world, run.spares, run.config.parallel.data) == (data, spares, data)
    assert [*run.plans] == [12 // data]
    (notice,) = [notice for notice in run.notices if "run.elastic" in notice]
    assert notice.startswith(f"run.elastic=data: {data} of {there} ranks train as data {data}, {12 // data} microbatch")
    assert (f"; {spares} " in notice) == bool(spares)


def test_what_is_wanted_in_full_strength_is_no_contradiction() -> None:
    assert on(None, parallel__data=4).sizes.data == 4
    assert on(3, parallel__data=4).sizes.data == 3
    assert on(9, parallel__data=4).spares == 5
    assert on(3, nproc=4).sizes.data == 3
    assert on(9, nproc=4).sizes.data == 4
    assert on(None, nproc=7).spares == 1
    assert on(None, nproc=2, parallel__data=6).sizes.data == 2


def test_copies_that_are_wanted_and_do_not_divide_the_batch_are_not_left_in_silence() -> None:
    line = "run.elastic=data: 4 of 5 ranks train as data 4, 3 microbatches a step; 1 is spare, as the global batch"
    (notice,) = [notice for notice in on(None, parallel__data=5).notices if "run.elastic" in notice]
    assert notice.startswith(line)
    assert not [notice for notice in on(None, parallel__data=4).notices if "run.elastic" in notice]


def test_all_sizes_but_data_stay() -> None:
    run = on(7, plugins=("schedule=1f1b",), parallel__pipeline=2)
    assert (run.sizes.pipeline, run.sizes.data, run.spares) == (2, 3, 1)


def test_a_size_whose_microbatches_the_schedule_refuses_is_passed_over() -> None:
    """Interleaved takes multiples of its stages: 12 samples over 4 copies are 3 microbatches each, no multiple of 2."""
    run = on(9, plugins=("schedule=interleaved",), parallel__pipeline=2, parallel__chunks=2)
    assert (run.sizes.data, [*run.plans]) == (3, [4])


@pytest.mark.parametrize(
    ("there", "values", "line"),
    [
        (1, {"parallel__pipeline": 2}, "1 rank is too few: this run trains on 2, 4, 6, 8, 12, 24 ranks, where a copy"),
        (3, {"run__min_ranks": 4}, "run.min_ranks=4 leaves none .*; set run.min_ranks to 2 or less"),
        (7, {"train__micro_batch_size": 5}, "train.micro_batch_size=5 x parallel.expert=1 does not divide 12 samples"),
        (0, {}, "a run of 0 ranks was asked for"),
        (2_000_000, {}, "a run of 2000000 ranks was asked for"),
    ],
)
def test_where_nothing_fits_the_line_has_the_arithmetic(there: int, values: dict[str, Any], line: str) -> None:
    with pytest.raises(RunError, match=line):
        on(there, plugins=("schedule=1f1b",), **values)


def test_without_it_as_many_ranks_as_there_are_must_fit() -> None:
    assert on(4, run__elastic="off").sizes.data == 4
    with pytest.raises(RunError, match="1 x 5 = 5"):
        on(5, run__elastic="off")


def test_a_smallest_number_of_ranks_without_a_policy_gets_a_notice() -> None:
    notice = "run.min_ranks=2 changes nothing without run.elastic"
    assert notice in on(None, run__elastic="off", run__min_ranks=2).notices
    assert notice not in on(4, run__min_ranks=2).notices


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"run__elastic": "off"},
            "guard.exclude=differing,slow leaves out ranks: run.elastic=off .*set run.elastic=data",
        ),
        ({"guard__replica_interval": 0}, "leaves out ranks that differ: guard.replica_interval=0 compares none"),
        ({"guard__straggler_interval": 0}, "leaves out ranks that are slow: guard.straggler_interval=0 compares none"),
    ],
)
def test_ranks_are_left_out_only_where_others_go_on_and_a_guard_names_them(values: dict[str, Any], line: str) -> None:
    exclude: dict[str, Any] = {"guard__exclude": ("differing", "slow")}
    assert on(4, **exclude).config.guard.exclude == ("differing", "slow")
    with pytest.raises(RunError, match=line):
        on(4, **exclude, **values)


def test_the_policy_is_known_before_any_plugin_is_imported() -> None:
    assert run_setting(Request(("preset:tiny",), plugins=("schedule=none-such",)), "elastic") == "off"
    assert run_setting(Request(("preset:tiny",), sets=("run.elastic=plan",)), "elastic") == "plan"
    assert run_setting(Request(("preset:tiny",)), "device") == "auto"


def test_a_fault_may_be_of_a_rank_that_is_not_there_now() -> None:
    environment = {"MEGATRON_RUN_FAULT": "rank=3,step=1,at=data,kind=kill"}
    asked = Request(("preset:tiny",), values=TWELVE, nproc=4, there=3, environment=environment)
    assert resolve(asked).sizes.data == 3
    with pytest.raises(RunError, match="rank=3 is not among 3 ranks"):
        resolve(Request(("preset:tiny",), values=TWELVE, nproc=3, environment=environment))


@pytest.mark.parametrize(
    ("nproc", "sets", "data"),
    [
        pytest.param(4, {}, 4, id="so many ranks"),
        pytest.param(None, {"parallel.data": 6}, 6, id="so many copies"),
        pytest.param(None, {}, None, id="as many as there are"),
    ],
)
def test_the_record_of_a_run_on_fewer_ranks_begins_it_on_all_again(
    tmp_path: Path, nproc: int | None, sets: dict[str, Any], data: int | None
) -> None:
    few = on(3, nproc, **sets)
    few = replace(
        few, config=few.config.model_copy(update={"run": few.config.run.model_copy(update={"folder": tmp_path})})
    )
    record = tmp_path / "config.yaml"
    record.write_text(to_yaml(as_typed(few)))
    again = resolve(Request((str(record),), there=12))
    assert (few.sizes.data, again.sizes.data) == (3, data or 12)
    assert again.config.run.folder == tmp_path
    again = resolve(Request((str(record),), there=3))
    assert again.config == few.config


def test_the_record_of_a_planned_layout_has_the_plugins_and_sizes_that_were_typed() -> None:
    typed = {"run.elastic": "plan", "train.micro_batch_size": 1, "train.global_batch_size": 8, "parallel.pipeline": 2}
    request = Request(("preset:tiny",), plugins=("schedule=1f1b",), values=typed, nproc=4, there=3)
    planned = {"parallel.pipeline": "1", "parallel.data": "2", "schedule": "gpipe"}
    few = resolve(replace(request, planned=planned))
    assert (few.config.parallel.pipeline, str(few.one("schedule"))) == (1, "schedule=gpipe")
    record = as_typed(few)
    assert (record.config.parallel.pipeline, record.config.parallel.data) == (2, 2)
    assert str(record.one("schedule")) == "schedule=1f1b"
    assert Request.from_json(few.request.to_json()) == few.request
    assert as_typed(on(None, 4)).config == on(None, 4).config
