"""Options of a mixture that do nothing where they are set are told, each with why; those that work are not."""

from __future__ import annotations

import pytest

from tests.support.resolving import resolved

MIXTURE = ("model.experts.count=4", "model.num_layers=4")


def notices(*sets: str) -> tuple[str, ...]:
    return resolved(sets=[*MIXTURE, *sets]).notices


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (
            ("experts.router.pre_softmax=true", "experts.router.score_function=sigmoid"),
            "experts.router.score_function=sigmoid has no softmax",
        ),
        (("experts.drop_policy=position",), "without model.experts.capacity_factor no token is dropped"),
        (("experts.layer_pattern=0,1,0,1,1",), "5 values for 4 layers: those after the first 4 do nothing"),
        (("experts.layer_freq=5",), "is above model.num_layers=4: layer 0 alone has experts"),
        (("experts.shared.gate=true",), "without model.experts.shared.ffn_size there is no shared expert"),
        (("experts.dispatcher=allgather",), "with parallel.expert=1 every rank holds all experts"),
    ],
)
def test_what_does_nothing_is_told(sets: tuple[str, ...], says: str) -> None:
    (notice,) = notices(*(f"model.{each}" for each in sets))
    assert notice.startswith(f"model.{sets[0].partition('=')[0]}")
    assert notice.endswith(says)


@pytest.mark.parametrize(
    "sets",
    [
        ("experts.router.pre_softmax=true",),
        ("experts.drop_policy=position", "experts.capacity_factor=0.5"),
        ("experts.layer_pattern=0,1,0,1",),
        ("experts.layer_freq=4",),
    ],
)
def test_what_works_is_not(sets: tuple[str, ...]) -> None:
    assert not notices(*(f"model.{each}" for each in sets))


def test_a_capacity_that_drops_most_choices_is_told_with_its_arithmetic() -> None:
    """64 tokens that meet 2 of 4 experts are 128 choices, 32 an expert: a tenth is 3.2, rounded up."""
    (notice,) = notices("model.experts.capacity_factor=0.1", "train.micro_batch_size=2", "train.sequence_length=32")
    assert notice == (
        "model.experts.capacity_factor=0.1 drops most choices: 4 experts x 4 tokens keep at most 16 of the 128 choices "
        "of a microbatch, 12%"
    )
