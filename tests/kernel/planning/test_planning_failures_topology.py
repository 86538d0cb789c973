"""What a topology that cannot be gets: the arithmetic, the nearest that can, and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from tests.support.plugin_file import schedule_file
from tests.support.resolving import mistake, mistakes


@pytest.mark.parametrize(
    ("nproc", "sets", "line"),
    [
        (
            3,
            ["parallel.pipeline=2"],
            (
                "a world of 3 ranks does not divide: parallel.tensor 1 x parallel.pipeline 2 = 2 ranks hold one copy "
                "of the model (from --set parallel.pipeline); start 2 or 4 ranks (--nproc 2)"
            ),
        ),
        (
            1,
            [],
            (
                "a world of 1 ranks does not divide: parallel.tensor 1 x parallel.pipeline 2 = 2 ranks hold one copy "
                "of the model (from the suggestion of schedule=1f1b); start 2 ranks (--nproc 2)"
            ),
        ),
        (
            4,
            ["parallel.data=4"],
            (
                "a world of 4 ranks was asked for: parallel.tensor 1 x parallel.pipeline 2 x parallel.data 4 = 8 "
                "(from the suggestion of schedule=1f1b and --set parallel.data); "
                "start 8 ranks (--nproc 8), or leave parallel.data open"
            ),
        ),
        (0, [], "--nproc 0 starts no rank; start at least 1"),
    ],
)
def test_a_world_that_does_not_divide(nproc: int, sets: list[str], line: str) -> None:
    assert mistake(plugins=["schedule=1f1b"], nproc=nproc, sets=sets) == (line, ExitCode.INPUT)


@pytest.mark.parametrize(
    ("batch", "nproc", "nearest"), [(6, 4, "8"), (10, 2, "8 or 12"), (9, 1, "8 or 10"), (1, 1, "2")]
)
def test_a_global_batch_that_does_not_divide(batch: int, nproc: int, nearest: str) -> None:
    assert mistake(nproc=nproc, sets=[f"train.global_batch_size={batch}"]) == (
        (
            f"train.global_batch_size={batch} is not a multiple of micro batch x data parallel: 2 x {nproc} = "
            f"{2 * nproc} (from --set train.global_batch_size); set train.global_batch_size to {nearest}"
        ),
        ExitCode.INPUT,
    )


def test_a_group_size_that_was_chosen_is_traced() -> None:
    line, _ = mistake(plugins=["schedule=interleaved,group_size=3"], sets=["train.global_batch_size=8"])
    assert "cannot run 4 microbatches in groups of 3 (schedule.group_size) over 2 stages: " in line
    assert "(from --set train.global_batch_size and --plugin schedule=interleaved,group_size=3); " in line


@pytest.mark.parametrize(("layers", "nearest"), [(6, "4 or 8"), (3, "4"), (9, "8 or 12")])
def test_layers_that_do_not_divide(layers: int, nearest: str) -> None:
    assert mistake(plugins=["schedule=interleaved"], sets=[f"model.num_layers={layers}"]) == (
        (
            f"{layers} layers do not divide over 2 stages x 2 chunks = 4 places (from the suggestion of "
            f"schedule=interleaved and --set model.num_layers); set model.num_layers to {nearest}, choose "
            f"parallel.pipeline x parallel.chunks that divide {layers}, or give parallel.layers as 4 counts"
        ),
        ExitCode.INPUT,
    )


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ("1,1", "parallel.layers adds up to 2, the model has 4 layers (from --set parallel.layers); "),
        ("4", "parallel.layers has 1 count for 2 stages x 1 chunk (from --set parallel.layers); "),
    ],
)
def test_layer_counts_that_do_not_add_up(counts: str, why: str) -> None:
    line, code = mistake(plugins=["schedule=1f1b"], sets=[f"parallel.layers={counts}"])
    assert line.startswith(why)
    assert code == ExitCode.INPUT


def test_heads_that_do_not_divide() -> None:
    line, code = mistake(sets=["model.num_heads=3"])
    assert line == (
        "model.num_heads=3: hidden_size 32 does not divide over 3 heads: 32 / 3 = 10.6667; "
        "set num_heads to 2 or 4, or hidden_size to 30 or 33, or set head_size (from --set model.num_heads)"
    )
    assert code == ExitCode.INPUT


@pytest.mark.parametrize(
    ("text", "chosen", "fix"),
    [
        (
            "parallel.pipeline=2",
            "schedule=sequential",
            "choose --plugin schedule=1f1b or --plugin schedule=gpipe",
        ),
        ("parallel.chunks=2", "schedule=sequential", "choose --plugin schedule=gpipe or --plugin schedule=interleaved"),
        ("parallel.tensor=2", "parallel-layer=dense", "tensor"),
        ("parallel.sequence=true", "parallel-layer=dense", "tensor"),
    ],
)
def test_a_size_that_no_plugin_serves(text: str, chosen: str, fix: str) -> None:
    line, code = mistake(sets=[text])
    assert line.startswith(
        f"{text} needs a plugin that serves it: {chosen} does not (from --set {text.split('=', maxsplit=1)[0]}); "
    )
    assert fix in line
    assert code == ExitCode.INPUT


def test_ranks_that_have_no_experts_to_split() -> None:
    line, code = mistake(sets=["parallel.expert=2"], nproc=2)
    assert line == (
        "parallel.expert=2 splits experts over ranks: the model has none: model.experts.count=0 "
        "(from --set parallel.expert); set model.experts.count to a multiple of 2, or parallel.expert=1"
    )
    assert code == ExitCode.INPUT


def test_experts_that_ranks_cannot_split() -> None:
    line, code = mistake(sets=["parallel.expert=4", "model.experts.count=6", "train.global_batch_size=8"], nproc=4)
    assert line == (
        "model.experts.count=6 do not split over parallel.expert=4 ranks: 6 / 4 = 1.5 (from --set parallel.expert and "
        "--set model.experts.count); set parallel.expert to 2, or model.experts.count to 4 or 8"
    )
    assert code == ExitCode.INPUT


@pytest.mark.parametrize(
    ("experts", "ways", "nproc", "sets", "what", "fix"),
    [
        (4, 3, None, [], "4 / 3 = 1.33333", "set parallel.expert to 2 or 4"),
        (4, 8, None, [], "4 / 8 = 0.5", "set parallel.expert to 4"),
        (6, 4, None, [], "6 / 4 = 1.5", "set parallel.expert to 2, or model.experts.count to 4 or 8"),
        (
            4,
            3,
            4,
            [],
            "and parallel.expert=3 does not divide the data-parallel size 4",
            "set parallel.expert to 2 or 4",
        ),
        (
            8,
            4,
            2,
            [],
            "does not divide the data-parallel size 2",
            "set parallel.expert to 2, or start 4 ranks (--nproc 4)",
        ),
        (
            4,
            2,
            None,
            ["parallel.data=1"],
            "the data-parallel size 1",
            "set parallel.expert to 1, or parallel.data to 2",
        ),
    ],
)
def test_ways_to_split_experts_that_work_with_everything_else(
    experts: int, ways: int, nproc: int | None, sets: list[str], what: str, fix: str
) -> None:
    """Nothing else is told: a batch of 8 in micro batches of 2 divides over each size that is offered."""
    sets = [f"model.experts.count={experts}", f"parallel.expert={ways}", *sets]
    line, code = mistake(sets=sets, nproc=nproc)
    assert what in line
    assert line.endswith(f"; {fix}")
    assert code == ExitCode.INPUT


def test_a_batch_that_does_not_divide_over_the_ranks_that_experts_ask_for() -> None:
    """Nobody gave a number of ranks, so the key that did is named."""
    sets = ["model.experts.count=6", "parallel.expert=6", "train.global_batch_size=8", "train.micro_batch_size=1"]
    line, code = mistake(sets=sets, nproc=None)
    assert "data parallel is 6 for parallel.expert=6 (from" in line
    assert "--set parallel.expert" in line
    assert "or lower parallel.expert" in line
    assert code == ExitCode.INPUT
    line, _ = mistake(sets=sets, nproc=6)  # these ranks the user asked for
    assert "parallel.expert" not in line


def test_experts_and_ranks_that_nothing_divides_are_told_with_the_batch() -> None:
    experts, batch = mistakes(sets=["model.experts.count=4", "parallel.expert=2"], nproc=3)
    assert str(experts) == (
        "parallel.expert=2 does not divide the data-parallel size 3: nothing above 1 divides both 4 experts and 3 "
        "ranks (from --set parallel.expert); set parallel.expert to 1, or start 2 or 4 ranks (--nproc 2)"
    )
    assert str(batch).startswith(
        "train.global_batch_size=8 is not a multiple of micro batch x data parallel: 2 x 3 = 6"
    )


@pytest.mark.parametrize(
    ("sets", "fix"),
    [
        (
            ["model.experts.count=8", "model.experts.top_k=1"],
            "set model.experts.router.pre_softmax to true (from --set model.experts.top_k)",
        ),
        (["model.experts.count=1"], "; set model.experts.count to 2 or more, or to 0 for the one network "),
        (
            ["model.experts.count=1", "model.experts.top_k=1"],
            "; set model.experts.count to 2 or more, or to 0 for the one network ",
        ),
        (["model.experts.count=4", "model.experts.top_k=5"], "; set it to at most 4 "),
    ],
)
def test_a_router_that_cannot_choose(sets: list[str], fix: str) -> None:
    line, code = mistake(sets=sets)
    assert fix in line
    assert code == ExitCode.INPUT


@pytest.mark.parametrize("key", ["pipeline", "chunks"])
def test_interleaved_refuses_one_stage_or_chunk_only_when_asked_for_it(key: str) -> None:
    line, code = mistake(plugins=["schedule=interleaved"], sets=[f"parallel.{key}=1"])
    assert f"(from --set parallel.{key}); " in line
    assert "--plugin schedule=1f1b" in line
    assert code == ExitCode.INPUT


def test_microbatches_that_do_not_divide_name_the_nearest() -> None:
    line, code = mistake(plugins=["schedule=interleaved"], sets=["train.global_batch_size=6"])
    assert "interleaved cannot run 3 microbatches" in line
    assert "2 or 4 microbatches" in line
    assert code == ExitCode.INPUT


def test_a_ramp_up_is_checked_at_every_count_it_meets() -> None:
    sets = ["train.ramp_up.start=2", "train.ramp_up.increment=2", "train.ramp_up.samples=16"]
    line, code = mistake(plugins=["schedule=interleaved"], sets=sets)
    assert "1 microbatch " in line or "3 microbatches" in line
    assert code == ExitCode.INPUT


DROPPED = 'return [[Action("F", 0, 0), Action("B", 0, 0)]] * spec.stages'
DUPLICATED = """
order = [Action(op, m, 0) for m in range(spec.microbatches) for op in "FB"]
return [order + order[-1:]] * spec.stages
"""
LATE_ON_STAGE_1 = """
forwards = [Action("F", m, 0) for m in range(spec.microbatches)]
backwards = [Action("B", m, 0) for m in range(spec.microbatches)]
alternating = [action for pair in zip(forwards, backwards) for action in pair]
return [alternating, forwards + backwards]
"""


@pytest.mark.parametrize(
    ("actions", "says"),
    [
        (DROPPED, "stage 0: F1.0 is missing: every microbatch visits every chunk"),
        (DUPLICATED, "stage 0, action 8: B3.0 is repeated: it already stands at action 7"),
        (LATE_ON_STAGE_1, "the schedule deadlocks: stage 0, action 1: B0.0 waits for B0.0 of stage 1"),
        ("return [[1]] * spec.stages", "stage 0, action 0: 1 is not an Action"),
        ("return [None, 3]", "it did not return a sequence of actions for each stage (TypeError: 'NoneType'"),
        ("print(end='')", "actions failed: it returned None, and must return a sequence: is its return missing?"),
        ("raise KeyError('lost')", "actions failed: KeyError: 'lost' (mine.py, line "),
    ],
)
def test_an_illegal_schedule_is_found_before_launch(actions: str, says: str, tmp_path: Path) -> None:
    mine = schedule_file(tmp_path / "mine.py", actions=actions)
    line, code = mistake(plugins=[f"schedule={mine}"], sets=["parallel.pipeline=2"])
    assert line.startswith(("schedule=mine of ", "plugin schedule=mine of "))
    assert says in line
    assert f"(from --plugin schedule={mine})" in line
    assert code == ExitCode.PLUGIN


def test_plugins_that_do_not_fit_each_other_are_named(tmp_path: Path) -> None:
    needy = schedule_file(tmp_path / "needy.py", info='requires=frozenset({"optimizer=zero1"})')
    line, code = mistake(plugins=[f"schedule={needy}"])
    assert line.startswith("schedule=needy requires optimizer=zero1, which no chosen plugin provides (from --plugin ")
    assert code == ExitCode.PLUGIN
    rival = schedule_file(tmp_path / "rival.py", info='conflicts=frozenset({"optimizer=adamw"})')
    line, code = mistake(plugins=[f"schedule={rival}"])
    assert line.startswith("schedule=rival does not work together with optimizer=adamw")
    assert code == ExitCode.PLUGIN
