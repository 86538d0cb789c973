"""The keys and values of the columns that a layer has read, while texts are generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class KeyValueCache:
    """The keys and values of the columns that were read; sizes and type are those of ``key`` [s, b, k, d].

    One buffer [b, k, room, d] each, in which a query finds each head's keys in a row. It doubles when it is full.
    """

    def __init__(self, key: Tensor) -> None:
        _, b, k, d = key.shape
        self._keys, self._values = key.new_empty(b, k, 0, d), key.new_empty(b, k, 0, d)

    def extend(self, key: Tensor, value: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Write key and value [s, b, k, d] from column ``first`` on; return those of all columns [c, b, k, d]."""
        stop = first + len(key)
        if stop > self._keys.shape[2]:
            self._keys, self._values = (self._grown(buffer, first, 2 * stop) for buffer in (self._keys, self._values))
        for buffer, new in ((self._keys, key), (self._values, value)):
            buffer[:, :, first:stop] = new.permute(1, 2, 0, 3)  # [s, b, k, d] -> [b, k, s, d]
        return self._keys[:, :, :stop].permute(2, 0, 1, 3), self._values[:, :, :stop].permute(2, 0, 1, 3)

    def _grown(self, buffer: Tensor, columns: int, room: int) -> Tensor:
        grown = buffer.new_empty(*buffer.shape[:2], room, buffer.shape[3])
        grown[:, :, :columns] = buffer[:, :, :columns]
        return grown

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but ``rows`` [r], which become the first r."""
        self._keys, self._values = self._keys[rows], self._values[rows]
