"""Configurations that split samples: what they give, what they are told, and what is refused before a start."""

from __future__ import annotations

from functools import cache

import pytest

from megatron_run.errors import InputError, Problems
from megatron_run.planning import load_config
from megatron_run.planning.describe import describe
from megatron_run.planning.run import ResolvedRun
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_engine.estimate.step_memory import step_memory

LONG = {"train.sequence_length": 1024, "data.vocab_size": 128}


def planned(*layers: str, **sets: object) -> ResolvedRun:
    stack = "+".join(("dense", *layers[:1]))
    chosen = [f"parallel-layer={','.join((stack, *layers[1:]))}"] if layers else []
    named = {name.replace("__", "."): value for name, value in sets.items()}
    return load_config("preset:tiny", plugins=chosen, sets={**LONG, **named})


def test_it_suggests_two_ranks_and_the_plan_shows_them() -> None:
    run = planned("context")
    assert (run.sizes.context, run.sizes.world) == (2, 2)
    assert "world 2 = tensor 1 x context 2 x pipeline 1 x data 1" in describe(run)
    assert run.notices == ("parallel-layer=context suggests parallel.context=2",)


def test_what_splits_nothing_or_too_little_is_told() -> None:
    (idle,) = planned("context", parallel__context=1).notices
    assert idle.startswith("parallel-layer=context changes nothing")
    (short,) = planned("context", parallel__context=2, train__sequence_length=32).notices
    assert short.startswith("parallel.context=2 splits samples of 32 tokens into pieces of 8")
    told = planned("context", model__experts__count=4, model__experts__capacity_factor=1.0, parallel__context=2).notices
    assert any("other tokens are dropped" in each for each in told)


def test_a_key_without_its_plugin_is_refused() -> None:
    with pytest.raises((InputError, Problems), match=r"parallel.context=2 needs a plugin that serves it"):
        planned(parallel__context=2)


@pytest.mark.parametrize(
    ("options", "sets", "said"),
    [
        (
            (),
            {"train__sequence_length": 1022},
            "train.sequence_length=1022 does not split over parallel.context=2 ranks",
        ),
        (
            ("method=ulysses",),
            {"model__num_heads": 2, "model__num_kv_heads": 1},
            "1 key-value heads do not split over parallel.context=2",
        ),
    ],
)
def test_what_does_not_split_is_refused_before_a_start(
    options: tuple[str, ...], sets: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError) as refused:
        model_size(planned("context", *options, **sets))
    assert said in str(refused.value)


def test_heads_of_tensor_ranks_are_told_in_the_numbers_of_the_user() -> None:
    sets = {"parallel.context": 2, "parallel.tensor": 4, "model.num_heads": 8, "model.num_kv_heads": 4, **LONG}
    run = load_config("preset:tiny", plugins=["parallel-layer=tensor+context,method=ulysses"], sets=sets)
    with pytest.raises(InputError, match=r"1 key-value heads of each of parallel.tensor=4 ranks do not split over"):
        model_size(run)


def test_a_model_of_whole_samples_is_refused_by_name() -> None:
    sets = {"train.sequence_length": 64, "data.use": "mock", "model.num_layers": 2, "model.hidden_size": 16}
    run = load_config(
        {"model": {"use": "bert", "num_heads": 2}, "data": {"use": "mock"}},
        plugins=["parallel-layer=dense+context"],
        sets={**sets, "train.steps": 1, "train.global_batch_size": 2, "train.micro_batch_size": 1},
    )
    with pytest.raises(InputError, match=r"model=bert computes whole samples, and parallel.context=2 splits"):
        model_size(run)


@cache
def activations(method: str, ranks: int, *, gpu: bool) -> int:
    """Bytes that a rank keeps for its backward."""
    sets = {"model__hidden_size": 128, "train__precision": "bf16", "train__micro_batch_size": 1, "model__num_layers": 1}
    memory = step_memory(planned("context", f"method={method}", parallel__context=ranks, **sets), gpu=gpu)
    assert memory is not None
    return memory[0]["activations"]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_a_dry_run_counts_half_of_what_depends_on_the_sequence(method: str, *, gpu: bool) -> None:
    # Fused attention keeps nothing that grows with the square of the sequence. On one rank all methods compute alike.
    share = activations(method, 2, gpu=gpu) / activations("ring", 1, gpu=gpu)
    # Ulysses keeps what its attention made of whole samples, and what it got back for it.
    assert share == pytest.approx(0.5, abs=0.035 if method == "ulysses" else 0.001)
