"""Relative position biases (Raffel et al. 2020, "T5", section 2.1): a number for each head and distance.

Distances share *buckets*: near ones have one each, farther ones share one by their logarithm. One table serves all
layers of the encoder, another those of the decoder. Both lie with the embedding, and travel to the other stages beside
the streams: so their gradients come back the way of all others.

Legend: q queries, c keys, b micro batch, n heads, t tensor-parallel size, k buckets.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run_engine.nn import build_device
from megatron_run_engine.nn.parallel import f

if TYPE_CHECKING:
    from megatron_run_engine.runtime import BuildContext
    from megatron_run_model_t5.options import T5Options


def buckets(length: int, count: int, farthest: int, *, both_ways: bool, device: str = "cpu") -> Tensor:
    """The bucket of each query and key: int64 [q, c], 0 to ``count`` - 1, on the ``device`` cpu, or meta for its size.

    ``both_ways``: keys behind the query have the second half of the buckets; else they are never seen. Half of the
    buckets of a direction hold one distance each, the others a range up to ``farthest``.
    """
    places = torch.arange(length, device=device)
    ahead = places[None] - places[:, None]  # key minus query
    first = torch.zeros_like(ahead)
    if both_ways:
        count //= 2
        first = torch.where(ahead > 0, count, 0)
        distance = ahead.abs()
    else:
        distance = (-ahead).clamp(min=0)
    single = count // 2
    # In fp32, as T5 was trained: a distance at the border of two buckets may round into the other one otherwise.
    share = torch.log(distance.clamp(min=1).float() / single) / math.log(farthest / single)
    ranges = (single + (share * (count - single)).long()).clamp(max=count - 1)
    return first + torch.where(distance < single, distance, ranges)


class PositionBias(nn.Module):
    """Makes what a chunk's layers add to the products of queries and keys: biases of positions, and masks."""

    encoder: Tensor
    decoder: Tensor

    def __init__(self, context: BuildContext, options: T5Options, encoder_length: int) -> None:
        super().__init__()
        lengths = {"encoder": encoder_length, "decoder": context.train.sequence_length}
        device = build_device(context)
        for name, length in lengths.items():
            found = buckets(
                length,
                options.position_buckets,
                options.position_distance,
                both_ways=name == "encoder",
                device="meta" if device.type == "meta" else "cpu",  # logarithms round otherwise elsewhere
            )
            self.register_buffer(name, found.to(device), persistent=False)
        self._peers = context.groups.parallel_group(context.topology, "tensor")
        heads = options.num_heads // self._peers.size
        self._heads = slice(self._peers.index * heads, (self._peers.index + 1) * heads)

    def own(self, biases: Tensor) -> Tensor:
        """Of both tables [2, k, n] this rank's heads, [2, k, n/t]; the backward sums over the ranks."""
        return f(biases, self._peers)[..., self._heads]

    def of_encoder(self, table: Tensor, length: int, mask: Tensor | None) -> Tensor:
        """The encoder's table [k, n/t], ``mask`` [b, c] 0 at padding -> [1 or b, n/t, q, c]."""
        bias = self._biases(table, self.encoder[:length, :length])
        return bias if mask is None else bias.masked_fill(_hidden(mask), _least(bias))

    def of_decoder(self, table: Tensor, length: int) -> Tensor:
        """The decoder's table [k, n/t] -> [1, n/t, q, c], where later keys are hidden."""
        bias = self._biases(table, self.decoder[:length, :length])
        later = torch.ones(length, length, dtype=torch.bool, device=bias.device).triu(1)
        return bias.masked_fill(later, _least(bias))

    @staticmethod
    def across(mask: Tensor, like: Tensor) -> Tensor:
        """A mask that hides the encoder's padding, where ``mask`` [b, c] is 0: [b, 1, 1, c], as ``like``."""
        hidden = _hidden(mask)
        return like.new_zeros(hidden.shape).masked_fill_(hidden, _least(like))

    @staticmethod
    def _biases(table: Tensor, where: Tensor) -> Tensor:
        return F.embedding(where, table).permute(2, 0, 1)[None]  # [q, c, n/t] -> [1, n/t, q, c]


def _hidden(mask: Tensor) -> Tensor:
    return (mask == 0)[:, None, None]  # [b, 1, 1, c]


def _least(like: Tensor) -> float:
    """A number that hides a key. It is finite because a row of padding alone would make the softmax return NaN."""
    return torch.finfo(like.dtype).min
