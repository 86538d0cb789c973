from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_run.contracts.schedule import Action
from megatron_run.errors import InputError
from megatron_run.pipeline.picture import leading_forwards, phases
from megatron_run_cli.reports.schedule_report import (
    fault_record,
    plan_record,
    plan_text,
    write_svg,
    write_trace,
)
from tests.support.drawn_plans import interleaved_plan, one_forward_one_backward_plan, plan_of
from tests.support.random_schedules import looped_spec, random_plan

GOLDEN = Path(__file__).with_name("interleaved_4_2_8.json")


def test_the_record_of_interleaved_is_the_golden_one() -> None:
    assert plan_record(interleaved_plan()) == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_the_golden_record_holds_the_closed_formulas() -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    stages, chunks, microbatches = 4, 2, 8
    assert golden["bubble_fraction"] == pytest.approx((stages - 1) / (chunks * microbatches + stages - 1))
    for rank in golden["ranks"]:
        stage = rank["rank"]
        warmup = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
        assert rank["warmup"] == rank["peak_in_flight"] == warmup
        assert rank["layers"] == [[stage], [stages + stage]]
        assert rank["order"][:warmup] == [1] * 4 + [2] * min(4, warmup - 4) + [1] * max(0, warmup - 8)
        assert sorted(rank["order"]) == sorted([1, 2, -1, -2] * microbatches)
    assert golden["ranks"][3]["actions"][:7] == ["F0.0", "F1.0", "F2.0", "F3.0", "F0.1", "B0.1", "F1.1"]


def test_weight_gradients_are_actions_but_not_in_the_order() -> None:
    (rank,) = plan_record(plan_of("F0.0 I0.0 W0.0"))["ranks"]
    assert rank["actions"] == ["F0.0", "I0.0", "W0.0"]
    assert rank["order"] == [1, -1]


def test_a_fault_is_said_instead_of_ranks() -> None:
    record = fault_record(2, 1, 4, "stage 0: B0.0 is missing")
    assert record["valid"] is False
    assert "ranks" not in record


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("F0.0 F1.0 B0.0 B1.0", (2, 0, 2)),
        ("F0.0 B0.0 F1.0 B1.0", (1, 2, 1)),
        ("F0.0 F1.0 B0.0 F2.0 B1.0 B2.0 S0.0", (2, 2, 3)),
        ("F0.0 I0.0 F1.0 W0.0 I1.0 W1.0", (1, 2, 3)),
        ("F0.0 F1.0", (2, 0, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_phases_part_at_the_first_backward_and_the_last_forward(text: str, expected: tuple[int, int, int]) -> None:
    assert phases([Action.parse(word) for word in text.split()]) == expected


@pytest.mark.parametrize("seed", range(20))
def test_phases_hold_every_action_once(seed: int) -> None:
    for actions in random_plan(seed).lists:
        warmup, steady, cooldown = phases(actions)
        assert warmup + steady + cooldown == len(actions)
        assert all(action.op not in "BI" for action in actions[:warmup])
        assert all(action.op != "F" for action in actions[warmup + steady :])
        assert leading_forwards(actions) == sum(action.op == "F" for action in actions[:warmup])


def test_the_text_says_shape_memory_bubble_and_order() -> None:
    text = plan_text(one_forward_one_backward_plan(), "schedule=1f1b")
    first, second, third, *_ = text.splitlines()
    assert first == "schedule=1f1b: a step of 8 microbatches on 4 stages x 1 chunk"
    assert second == "time 33 forwards of a chunk, bubble 27.3% of it"
    assert third == "by stage: in flight at most 4, 3, 2, 1; warm-up 4, 3, 2, 1 forwards"
    assert text.splitlines()[-1].endswith("bit for bit as sequential")


def test_the_text_says_when_gradients_add_up_in_another_order() -> None:
    text = plan_text(plan_of("F0.0 F1.0 B1.0 B0.0"), "schedule=mine")
    assert text.endswith("in another order than sequential")


def test_the_text_counts_weight_gradients_that_wait() -> None:
    text = plan_text(plan_of("F0.0 F1.0 I0.0 I1.0 F2.0 W0.0 W1.0 B2.0"), "mine")
    assert "in flight at most 2;" in text
    assert "weight gradients waiting at most 2; in flight or waiting at most 3" in text


def test_of_many_stages_the_text_names_a_few() -> None:
    spec = looped_spec(20, 1, 1)
    text = plan_text(plan_of(*["F0.0 B0.0"] * 20, spec=spec), "mine")
    assert "in flight at most 1, 1, ..., 1;" in text


@pytest.mark.parametrize("write", [write_svg, write_trace])
def test_a_file_that_cannot_be_written_is_an_error_of_the_user(tmp_path: Path, write: object) -> None:
    assert callable(write)
    with pytest.raises(InputError, match="nowhere/step cannot be written: No such file"):
        write(one_forward_one_backward_plan(), "mine", tmp_path / "nowhere/step")
