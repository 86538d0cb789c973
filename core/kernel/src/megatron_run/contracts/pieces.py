"""The pieces of a sample: which of its tokens a context-parallel rank holds.

Legend: s tokens of a sample, C context-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_run.errors import InputError
from megatron_run.errors.wording import nearest_multiples

#: Tokens of a piece below which a sample is short: its activations fit one rank, and messages are what a split adds.
SHORT = 256


@dataclass(frozen=True)
class Pieces:
    """The two of 2C equal pieces of each sample that rank ``index`` of ``ranks`` holds, from the front and the back.

    Under a causal mask token i attends to i + 1 tokens, so pieces j and 2C - 1 - j together have the same work for
    every j. That contiguous parts leave ranks idle, Brandon et al. 2023 ("Striped Attention", section 3) measure; the
    pairs are those of Megatron-LM. One rank holds a sample as it is.
    """

    index: int = 0
    ranks: int = 1

    def columns(self, length: int, index: int | None = None) -> tuple[range, ...]:
        """The columns of a sample of ``length`` tokens that this rank, or that of ``index``, holds, in order."""
        if self.ranks == 1:
            return (range(length),)
        size, front = length // (2 * self.ranks), self.index if index is None else index
        return tuple(range(piece * size, (piece + 1) * size) for piece in (front, 2 * self.ranks - 1 - front))

    def short(self, length: int) -> bool:
        """Whether a sample of ``length`` tokens is too short to be split so: more copies of the model exchange less."""
        return self.ranks > 1 and length // (2 * self.ranks) < SHORT

    def part(self, length: int) -> int:
        """The tokens that a rank holds of ``length``. Raises :class:`InputError` where pieces cannot be equal."""
        ways = 2 * self.ranks
        if self.ranks > 1 and length % ways:
            raise InputError(
                f"train.sequence_length={length} does not split over parallel.context={self.ranks} ranks",
                why=f"each holds two pieces of one length: {length} / {ways} = {length / ways:g}",
                fix=f"set train.sequence_length to {nearest_multiples(length, ways)}",
            )
        return length // self.ranks
