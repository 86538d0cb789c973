"""The next token: the rules of transformers' processors, ties, and chance that follows from seed, sample and place."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
import torch
from torch import Tensor

from megatron_run.errors import InputError
from megatron_run_engine.runtime.generation import Sampling, choose_tokens

VOCAB, ROWS = 23, 400


def logits() -> Tensor:
    return 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))


def often(sampling: Sampling, text: list[int]) -> Tensor:
    """How often each token is drawn, over many samples of one text: [v]."""
    drawn = choose_tokens(logits().expand(ROWS, -1), [text] * ROWS, range(ROWS), sampling)
    counts = Counter(drawn.tolist())
    return torch.tensor([counts[token] / ROWS for token in range(VOCAB)])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(1.0, top_k=5),
        Sampling(1.3, top_p=0.8),
        Sampling(1.0, top_p=0.01),
        Sampling(1.0, repetition_penalty=1.8),
        Sampling(1.7, top_k=9, top_p=0.7, repetition_penalty=1.5),
    ],
    ids=str,
)
def test_tokens_are_drawn_from_what_transformers_processors_leave(sampling: Sampling) -> None:
    pytest.importorskip("transformers")  # an oracle, which an offline bundle leaves out
    from transformers import (
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    text = [3, 7, 7, 11, 20]
    scores = logits()[None]
    ids = torch.tensor([text])
    if sampling.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    expected, found = scores.softmax(-1)[0], often(sampling, text)
    assert not found[scores[0] == -inf].any(), "a token was drawn that is left out"
    # Stratified numbers would be closer; these are independent: 5 standard deviations of a share of 400.
    assert (found - expected).abs().max() < 5 * (0.25 / ROWS) ** 0.5
    assert torch.equal(found, often(sampling, text))


def test_greedy_takes_the_likeliest_and_the_lowest_of_equal_ones() -> None:
    table = torch.tensor([[0.0, 2.0, 1.0], [1.0, 5.0, 5.0], [-3.0, 4.0 - 1e-6, 4.0], [7.0, 7.001, 0.0]])
    texts = [[0]] * len(table)
    assert choose_tokens(table, texts, [0] * 4, Sampling(0)).tolist() == [1, 1, 1, 1]
    assert choose_tokens(table, texts, [0] * 4, Sampling(0, repetition_penalty=1.1)).tolist() == [1, 1, 1, 1]
    assert choose_tokens(-table, [[2]] * 4, [0] * 4, Sampling(0, repetition_penalty=2.0)).tolist() == [0, 0, 0, 2]


def test_a_penalty_counts_each_token_of_the_text_once() -> None:
    table = torch.tensor([[2.0, 1.5, -1.0]])
    for text, expected in (([0], 1), ([0, 0, 0], 1), ([0, 1], 0), ([2], 0)):
        assert choose_tokens(table, [text], [0], Sampling(0, repetition_penalty=1.4)).tolist() == [expected]


def test_a_draw_depends_on_seed_sample_and_place_and_not_on_the_row() -> None:
    flat = torch.zeros(6, 1000)
    texts, samples = [[1], [1, 2], [1], [9], [5] * 7, [1]], [0, 0, 1, 0, 0, 0]
    first, second, third, fourth, _, last = choose_tokens(flat, texts, samples, Sampling(1.0)).tolist()
    assert len({first, second, third}) == 3
    assert first == fourth == last
    assert choose_tokens(flat[:1], [[1, 2]], [0], Sampling(1.0)).tolist() == [second]
    assert choose_tokens(flat[:1], [[1]], [0], Sampling(1.0, seed=1)).tolist() != [first]


def test_a_difference_in_the_last_digits_changes_no_draw() -> None:
    table = 3 * torch.randn(2000, 300, generator=torch.Generator().manual_seed(2))
    near = table + 1e-6 * torch.randn(table.shape, generator=torch.Generator().manual_seed(3))
    texts, samples = [[1]] * 2000, range(2000)
    for sampling in (Sampling(0), Sampling(1.0), Sampling(0.8, top_k=20, top_p=0.9)):
        same = choose_tokens(table, texts, samples, sampling) == choose_tokens(near, texts, samples, sampling)
        assert same.all()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: it must be at least 0"),
        ({"temperature": inf}, "temperature=inf: it must be at least 0"),
        ({"top_k": -1}, "top_k=-1: it must be at least 0"),
        ({"top_p": 0.0}, "top_p=0.0: it must be above 0 and at most 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: it must be above 0"),
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(InputError) as error:
        Sampling(**wrong)  # type: ignore[arg-type]
    assert str(error.value) == said
