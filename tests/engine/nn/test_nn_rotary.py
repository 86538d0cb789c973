"""Rotary positions."""

import torch

from megatron_run_engine.builtin.model.gpt import GptOptions, RopeOptions
from megatron_run_engine.nn.rotary import Rotary
from megatron_run_testing.build_contexts import single_process_context
from tests.support import plain_gpt


def rotary(length: int, theta: float = 10000.0) -> Rotary:
    options = GptOptions(
        num_layers=1, hidden_size=24, num_heads=3, vocab_size=5, position="rope", rope=RopeOptions(theta=theta)
    )
    return Rotary(single_process_context(options), options.spec(length, 5))


def test_pairs_turn_as_complex_numbers() -> None:
    x = torch.randn(6, 2, 3, 8).double()  # [s, b, n, d]
    expected = plain_gpt.rotate(x.permute(1, 2, 0, 3).flatten(0, 1), 500.0)  # [b * n, s, d]
    torch.testing.assert_close(rotary(9, 500.0)(x), expected.unflatten(0, (2, 3)).permute(2, 0, 1, 3))


def test_a_product_of_query_and_key_depends_on_their_distance_alone() -> None:
    query, key = torch.randn(8).double(), torch.randn(8).double()
    turn = rotary(32)
    queries, keys = turn(query.expand(32, 1, 1, 8))[:, 0, 0], turn(key.expand(32, 1, 1, 8))[:, 0, 0]
    products = queries @ keys.T  # [s, s]
    for distance in range(-31, 32):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert products[0, 0] != products[0, 5]


def test_the_first_position_stays() -> None:
    x = torch.randn(1, 1, 1, 8).double()
    torch.testing.assert_close(rotary(4)(x), x)
