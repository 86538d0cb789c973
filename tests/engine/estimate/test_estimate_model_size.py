from __future__ import annotations

import pytest

from megatron_run.errors import InputError
from megatron_run.planning import load_config
from megatron_run.planning.describe import spans
from megatron_run_cli.reports.dry_run import dry_run_json, dry_run_text
from megatron_run_engine.estimate.model_size import ModelSize, model_size
from megatron_run_engine.launch import train

LAYER = 12 * 32 * 32 + 13 * 32  # attention and feed-forward matrices, their biases and two norms of hidden size 32
WORDS, POSITIONS, NORM = 128 * 32, 32 * 32, 2 * 32


def counts(size: ModelSize) -> tuple[int, tuple[tuple[int, int], ...], int, int]:
    """Everything but the memory."""
    return size.parameters, tuple(stage[:2] for stage in size.stages), size.vocab, size.padded_vocab


def test_one_stage_holds_everything_once() -> None:
    size = model_size(load_config("preset:tiny"))
    whole = 4 * LAYER + WORDS + POSITIONS + NORM
    assert counts(size) == (whole, ((whole, 0),), 128, 128)


def test_a_matrix_of_two_parts_with_as_many_rows_as_words_is_not_the_vocabularys() -> None:
    size = model_size(load_config("preset:tiny", sets=["model.activation=swiglu", "model.ffn_size=128"]))
    assert (size.vocab, size.padded_vocab) == (128, 128)


def test_a_tensor_that_no_memory_holds_is_a_line() -> None:
    with pytest.raises(InputError, match=r"larger than any memory: .*lower model.hidden_size"):
        model_size(load_config("preset:tiny", sets={"model.hidden_size": 10**9}))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_two_stages_share_the_layers_and_both_hold_the_tied_embedding(schedule: str) -> None:
    run = load_config("preset:tiny", plugins=[f"schedule={schedule}"])
    size = model_size(run)
    assert [stage.parameters for stage in size.stages] == [2 * LAYER + WORDS + POSITIONS, 2 * LAYER + WORDS + NORM]
    assert size.parameters == model_size(load_config("preset:tiny")).parameters


def test_experts_count_whichever_rank_holds_them() -> None:
    sets = [
        "model.experts.count=4",
        "model.experts.ffn_size=16",
        "model.experts.layer_freq=4",
        "train.global_batch_size=8",
    ]
    expert, router = 2 * 16 * 32 + 16 + 32, 4 * 32
    whole = 4 * LAYER - (8 * 32 * 32 + 5 * 32) + router + 4 * expert + WORDS + POSITIONS + NORM
    for ranks in (1, 2, 4):
        size = model_size(load_config("preset:tiny", sets=[*sets, f"parallel.expert={ranks}"]))
        held = whole - (4 - 4 // ranks) * expert
        assert (size.parameters, size.stages[0].parameters) == (whole, held)


def test_a_dry_run_tells_the_mixture_and_who_holds_which_experts() -> None:
    """Four experts, a token is routed to two of them, in layers 0 and 2 of two stages; each on one of two ranks."""
    sets = ["model.experts.count=4", "model.experts.ffn_size=16", "model.experts.layer_freq=2", "parallel.expert=2"]
    run = load_config("preset:tiny", sets=sets, plugins=["schedule=1f1b"])
    expert, router = 2 * 16 * 32 + 16 + 32, 4 * 32
    whole = 4 * LAYER + 2 * (router - 8 * 32 * 32 - 5 * 32) + 8 * expert + WORDS + POSITIONS + NORM
    text, data = dry_run_text(run), dry_run_json(run)
    assert "experts: 4 in each of layers 0, 2, of which a token is routed to 2\n" in text
    assert "a rank holds of its layers' experts: 2 of each layer, as the topology lists them\n" in text
    assert f"parameters active for a token: {whole - 4 * expert:,} of {whole:,}\n" in text
    assert "  rank 1  stage 0  data 1  experts 2-3 of 4  layers 0-1\n" in text
    assert data["mixture"] == {"layers": [0, 2], "experts": 4, "top_k": 2, "parameters_per_token": whole - 4 * expert}
    assert [rank["experts"] for rank in data["topology"]["ranks"]] == [[0, 1], [2, 3]] * 2


@pytest.mark.parametrize("pipeline", ["parallel.pipeline=1", "parallel.pipeline=2"])
@pytest.mark.parametrize(
    ("key", "name", "fix"),
    [
        (
            "recompute",
            "core_atn",
            "which no .*did you mean 'core_attn'.*none, full, embedding, attn, mlp, head, loss, core_attn$",
        ),
        ("recompute", "moe_experts", "which no layer publishes .*the choices are none, full"),
        ("offload", "core_attn", "which no layer publishes .*none, full, embedding, attn, mlp, head, loss$"),
    ],
)
def test_a_segment_that_no_layer_has_is_refused_with_those_there_are(
    key: str, name: str, fix: str, pipeline: str
) -> None:
    plugins = ["schedule=1f1b"] if pipeline[-1] == "2" else []
    run = load_config("preset:tiny", sets=[f"train.{key}=mlp,{name}", pipeline], plugins=plugins)
    with pytest.raises(InputError, match=f"train.{key} names '{name}', {fix}"):
        train(run)


def test_a_dry_run_tells_no_mixture_where_there_is_none() -> None:
    run = load_config("preset:tiny")
    assert dry_run_json(run)["mixture"] is None
    assert "experts" not in dry_run_text(run)
    one_rank = load_config("preset:tiny", sets=["model.experts.count=4"])
    assert "a rank holds of its layers' experts: all of them\n" in dry_run_text(one_rank)


@pytest.mark.parametrize(
    ("numbers", "words"), [((), "none"), ((3,), "3"), ((0, 1, 2), "0-2"), ((0, 2, 3, 4, 7), "0, 2-4, 7")]
)
def test_numbers_are_told_in_few_words(numbers: tuple[int, ...], words: str) -> None:
    assert spans(numbers) == words


def test_a_dry_run_tells_winner_topology_parameters_and_picture() -> None:
    run = load_config("preset:tiny", plugins=["schedule=1f1b"])
    text = dry_run_text(run)
    assert "schedule        1f1b" in text
    assert "world 2 = tensor 1 x pipeline 2 x data 1" in text
    assert f"parameters of a rank: {2 * LAYER + WORDS + POSITIONS:,} on stage 0" in text
    assert "one step" in text
    assert f"parameters of the model: {4 * LAYER + WORDS + POSITIONS + NORM:,}" in text
    assert dry_run_json(run)["parameters_by_stage"] == [stage.parameters for stage in model_size(run).stages]


@pytest.mark.parametrize("plugins", [["optimizer=adamw"], ["optimizer=zero1"]])
def test_the_copy_of_a_save_behind_the_training_is_counted_where_there_is_one(plugins: list[str]) -> None:
    """Weights and two moments in fp32, of which each of two data-parallel ranks saves a half, and counts of steps."""
    sets = ["train.precision=bf16", "parallel.data=2"]
    (rank,) = model_size(load_config("preset:tiny", sets=sets, plugins=plugins)).stages
    assert "staging" not in rank.memory
    (rank,) = model_size(load_config("preset:tiny", sets=[*sets, "checkpoint.async_save=true"], plugins=plugins)).stages
    assert rank.memory["staging"] == pytest.approx(12 * rank.parameters / 2, rel=0.01)
