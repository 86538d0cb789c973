from __future__ import annotations

from dataclasses import replace

import torch

from megatron_run.contracts import Microbatch
from megatron_run_engine.runtime.rng import RandomStreams, initial_generator, mix


def draw(streams: RandomStreams, microbatch: Microbatch, layer: int = 0, segment: int = 0) -> torch.Tensor:
    streams.position(microbatch, layer, segment)
    return torch.rand(4)


def test_the_same_place_gives_the_same_numbers_whatever_ran_before() -> None:
    streams, microbatch = RandomStreams(7, torch.device("cpu")), Microbatch(0, 1, 0, {})
    first = draw(streams, microbatch)
    torch.rand(100)
    assert torch.equal(first, draw(streams, microbatch))


def test_every_coordinate_changes_the_numbers() -> None:
    streams, here = RandomStreams(7, torch.device("cpu")), Microbatch(0, 1, 0, {})
    seen = [
        draw(streams, here),
        draw(streams, replace(here, step=2)),
        draw(streams, replace(here, sample0=1)),
        draw(streams, here, layer=1),
        draw(streams, here, segment=1),
        draw(streams, here, layer=-1),
        draw(RandomStreams(8, torch.device("cpu")), here),
        draw(RandomStreams(7, torch.device("cpu"), shard=1), here),
    ]
    assert len({tuple(numbers.tolist()) for numbers in seen}) == len(seen)


def test_the_index_of_a_microbatch_on_its_rank_does_not_matter() -> None:
    streams = RandomStreams(7, torch.device("cpu"))
    assert torch.equal(draw(streams, Microbatch(0, 1, 8, {})), draw(streams, Microbatch(3, 1, 8, {})))


def test_mix_spreads_neighbours_over_the_whole_range() -> None:
    keys = [mix(1, 2, index) for index in range(4096)]
    assert len(set(keys)) == 4096
    assert all(0 <= key < 2**63 for key in keys)
    for bit in range(63):  # each bit is set about half the time: six standard deviations are 192
        assert abs(sum(key >> bit & 1 for key in keys) - 2048) < 192


def test_initial_values_depend_on_seed_and_name() -> None:
    def values(seed: int, name: str) -> torch.Tensor:
        return torch.randn(3, generator=initial_generator(seed, name))

    assert torch.equal(values(1, "a"), values(1, "a"))
    assert not torch.equal(values(1, "a"), values(1, "b"))
    assert not torch.equal(values(1, "a"), values(2, "a"))


def test_one_stream_is_equal_on_all_shards_and_the_other_is_each_ones_own() -> None:
    """Appendix B.2 of the Megatron-LM paper: what is whole is dropped alike, what is split is not."""
    microbatch, replicated, sharded = Microbatch(0, 1, 0, {}), [], []
    for shard in range(4):
        streams = RandomStreams(7, torch.device("cpu"), shard=shard)
        sharded.append(tuple(draw(streams, microbatch).tolist()))
        replicated.append(tuple(torch.rand(4, generator=streams.replicated).tolist()))
    assert len(set(replicated)) == 1
    assert len({*sharded, *replicated}) == 5, "no shard draws what another does, nor what all do"


def test_the_stream_of_all_shards_depends_on_the_place_alone_and_not_on_the_other() -> None:
    streams, here = RandomStreams(7, torch.device("cpu")), Microbatch(0, 1, 0, {})

    def draw_replicated(microbatch: Microbatch, layer: int = 0, segment: int = 0) -> tuple[float, ...]:
        streams.position(microbatch, layer, segment)
        torch.rand(3)  # as attention does, inside the same segment
        return tuple(torch.rand(4, generator=streams.replicated).tolist())

    places = [(here, 0, 0), (replace(here, step=2), 0, 0), (replace(here, sample0=1), 0, 0), (here, 1, 0), (here, 0, 1)]
    seen = [draw_replicated(*place) for place in places]
    assert len(set(seen)) == len(places)
    assert [draw_replicated(*place) for place in places] == seen
