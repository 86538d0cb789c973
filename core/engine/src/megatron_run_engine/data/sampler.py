"""Which sample comes at which position of the endless sample stream.

The stream is one shuffled pass over the data after another. It is a pure function of (length, seed, position): it does
not depend on the parallel layout, and a resumed run continues it by its position alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@lru_cache(maxsize=4)  # a pure function, remembered: train and validation each read one epoch, or two at its seam
def epoch_order(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The samples ``0..length-1`` in the order of ``epoch``, read-only, [length].

    They are sorted by the raw output of PCG64 seeded with (seed, epoch), which NumPy promises never to change, unlike
    the methods of its ``Generator``: a run may be resumed under another version.
    """
    order = np.argsort(np.random.PCG64([seed, epoch]).random_raw(length), kind="stable")
    order.setflags(write=False)
    return order


def sample_index(length: int, seed: int, position: int) -> int:
    """The sample at ``position`` of the stream over ``length`` samples; epoch = position // length."""
    epoch, offset = divmod(position, length)
    return int(epoch_order(length, seed, epoch)[offset])
