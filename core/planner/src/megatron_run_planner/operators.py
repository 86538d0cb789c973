"""The operators of a transformer layer and of the head on one tensor-parallel rank, by closed form.

A *product* is a matrix product; a *sweep* reads and writes memory once. Both are those of one forward; a backward does
each product twice (for its input and its weight). Values are of two bytes. Legend: ``n`` = ``s b`` tokens,
``h`` hidden, ``t`` tensor-parallel size, ``a`` heads.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_run_planner.workload import Model

#: Bytes of an activation.
_WIDTH = 2


class Product(NamedTuple):
    """``copies`` products (rows x depth) @ (depth x columns)."""

    rows: float
    columns: float
    depth: float
    copies: float = 1

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2 * self.rows * self.columns * self.depth * self.copies


class Sweep(NamedTuple):
    """``kernels`` kernels, each of which moves ``bytes``."""

    bytes: float
    kernels: int = 1


class Operators(NamedTuple):
    """One forward: ``attention`` FLOPs of scores and context, and whether the softmax is ``unfused``.

    ``products`` are ``attending`` of the attention and then those of the feed-forward layer; ``sweeps`` the norms, the
    residual connections, the activation, the heads' layouts, and then those of stored scores.
    """

    products: tuple[Product, ...]
    attention: float
    sweeps: tuple[Sweep, ...]
    unfused: bool = False
    attending: int = 2


def layer_operators(model: Model, micro_batch: int, tensor: int, expert: int = 1) -> Operators:
    """The forward of one layer for ``micro_batch`` samples on one of ``tensor`` ranks.

    With experts, every rank computes as many choices of tokens as it brings (an even load over ``expert`` ranks).
    """
    n, h, t = micro_batch * model.sequence, model.hidden, tensor
    wide = model.ffn_width
    up = wide * (model.matrices - 1)
    if model.experts:
        held = max(1.0, model.experts / expert)
        rows = n * model.top_k / held
        feed = [Product(rows, up / t, h, held), Product(rows, h, wide / t, held)]
    else:
        held, rows = 1.0, n
        feed = [Product(n, up / t, h), Product(n, h, wide / t)]
    if model.experts and model.shared_ffn:
        shared = model.shared_ffn
        feed += [Product(n, shared * (model.matrices - 1) / t, h), Product(n, h, shared / t)]
    width = model.context_width / t
    attending = [Product(n, model.qkv_width / t, h), Product(n, h, width)]
    if model.across:  # queries and output, then keys and values of the encoder's tokens
        attending += [Product(n, width, h), Product(n, h, width), Product(micro_batch * model.across, 2 * width, h)]
    scores = micro_batch * model.heads / t * model.sequence**2
    parts = 3 if model.across else 2
    sweeps = [
        Sweep(2 * _WIDTH * n * h, parts),  # the norms
        Sweep(3.5 * _WIDTH * n * h, parts),  # bias, dropout and residual, with the dropout's mask
        Sweep(2 * _WIDTH * rows * held * up / t),  # bias and activation
        Sweep(2 * _WIDTH * n * width, 3 * (parts - 1)),  # queries, keys and values, each to its own layout
    ]
    if not model.flash:
        sweeps += [Sweep(2 * _WIDTH * scores), Sweep(2.5 * _WIDTH * scores)]  # softmax; dropout with its mask
    # The fused softmax serves whole blocks of four heads; other shapes take six kernels of plain operators.
    unfused = not model.flash and (micro_batch * model.heads / t) % 4 != 0
    if unfused:
        sweeps.append(Sweep(2 * _WIDTH * scores, 6))
    looks = micro_batch * model.heads / t * model.sequence * model.across
    flops = 4 * (scores + looks) * model.head_size
    return Operators((*attending, *feed), flops, tuple(sweeps), unfused, len(attending))
