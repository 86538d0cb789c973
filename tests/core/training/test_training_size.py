from __future__ import annotations

import pytest

from megatron_run.resolve import load_config
from megatron_run.training.dry_run import dry_run_json, dry_run_text
from megatron_run.training.size import parameters_by_stage

LAYER = 12 * 32 * 32 + 13 * 32  # attention and feed-forward matrices, their biases and two norms of hidden size 32
WORDS, POSITIONS, NORM = 128 * 32, 32 * 32, 2 * 32


def test_one_stage_holds_everything_once() -> None:
    assert parameters_by_stage(load_config("preset:tiny")) == (4 * LAYER + WORDS + POSITIONS + NORM,)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_two_stages_share_the_layers_and_both_hold_the_tied_embedding(schedule: str) -> None:
    run = load_config("preset:tiny", plugins=[f"schedule={schedule}"])
    assert parameters_by_stage(run) == (2 * LAYER + WORDS + POSITIONS, 2 * LAYER + WORDS + NORM)


def test_the_124_million_of_gpt2() -> None:
    run = load_config("preset:gpt2-small", sets=["model.vocab_size=50257", "parallel.pipeline=1"])
    assert parameters_by_stage(run) == (124_439_808,)


def test_a_dry_run_tells_winner_topology_parameters_and_picture() -> None:
    run = load_config("preset:tiny", plugins=["schedule=1f1b"])
    text = dry_run_text(run)
    assert "schedule        1f1b" in text
    assert "world 2 = tensor 1 x pipeline 2 x data 1" in text
    assert f"parameters of a rank: {2 * LAYER + WORDS + POSITIONS:,} on stage 0" in text
    assert "one step" in text
    assert dry_run_json(run)["parameters_by_stage"] == list(parameters_by_stage(run))
