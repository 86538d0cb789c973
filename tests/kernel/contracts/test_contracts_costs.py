"""What a model's costs say of some of its layers: those alone, by kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_run.contracts.costs import AttentionCosts, FeedForwardCosts, LayerCosts, LayerKinds, ModelCosts, Part

FEED, MIXED = FeedForwardCosts(64), FeedForwardCosts(32, experts=4, top_k=2)


def layer(feed: Part, tokens: int = 8) -> LayerCosts:
    """A layer of its own, equal to others with the same feed-forward half."""
    return LayerCosts(16, tokens, (AttentionCosts.plain(2, 8.0), feed))


@pytest.mark.parametrize("kinds", [(FEED,), (FEED, MIXED), (FEED, FEED, MIXED)], ids=["alike", "in turn", "uneven"])
def test_a_part_has_the_layers_that_were_asked_for_by_kind(kinds: tuple[Part, ...]) -> None:
    model = ModelCosts(tuple(layer(kinds[index % len(kinds)]) for index in range(24)), vocabulary=100)
    for places in [(range(5),), (range(3, 4),), (range(2, 9), range(14, 20)), (range(24),), (range(3, 3),), ()]:
        part = model.part(*places)
        chosen = [model.layers[index] for place in places for index in place]
        assert part.total == len(chosen)
        assert {each: count for count, each in part.counts} == {each: chosen.count(each) for each in chosen}
        for cost in ("weights", "expert_weights", "flops"):
            assert getattr(part, cost) == sum(getattr(each, cost) for each in chosen)
    assert model.kinds.total == 24
    assert model.kinds.over(8).total == 3


def test_the_costs_of_a_model_are_those_of_its_parts() -> None:
    model = ModelCosts(tuple(layer(FEED if index < 3 else MIXED) for index in range(10)), 100, positions=8)
    longer = replace(model, layers=model.layers + model.layers[-2:])
    added = model.part(range(8, 10))
    assert longer.weights - model.weights == added.weights + added.expert_weights
    assert longer.flops_per_token - model.flops_per_token == pytest.approx(added.flops / 8)


def test_no_layers_cost_nothing() -> None:
    nothing = LayerKinds()
    assert nothing.total == nothing.weights == nothing.flops == nothing.mean(lambda each: each.weights) == 0
