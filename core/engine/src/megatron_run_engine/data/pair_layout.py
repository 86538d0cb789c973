"""The tokens that a tokenizer puts around and between two texts, such as BERT's ``[CLS] A [SEP] B [SEP]``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PairLayout:
    """The tokens ``before``, ``between`` and ``after`` two texts A and B.

    ``types`` are the kinds of the parts' tokens, in the order before, A, between, B, after. RoBERTa's are all of
    kind 0, with two tokens between.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    types: tuple[int, int, int, int, int] = (0, 0, 0, 1, 1)

    @property
    def size(self) -> int:
        """How many tokens it adds."""
        return len(self.before) + len(self.between) + len(self.after)


def layout_of(tokenizer: Any) -> PairLayout | None:
    """The layout of the post-processor of a tokenizer of the library `tokenizers`; None without one.

    It is asked for two texts: any forms of post-processors answer. Raises :class:`ValueError` where it is no such row.
    """
    if tokenizer.post_processor is None:
        return None
    found = tokenizer.encode("a", "a", add_special_tokens=True)
    texts = "".join("-" if each is None else str(each) for each in found.sequence_ids)  # of which text a token is
    row = re.fullmatch("(-*)(0+)(-*)(1+)(-*)", texts)
    if row is None:
        raise ValueError("it does not put the second text after the first one")
    spans = [slice(*row.span(part)) for part in range(1, 6)]
    before, _, between, _, after = (tuple(found.ids[span]) for span in spans)
    first, of_a, middle, of_b, last = (_kind(found.type_ids[span]) for span in spans)
    return PairLayout(before, between, after, (first, of_a, middle, of_b, last))


def _kind(types: Sequence[int]) -> int:
    if len({*types}) > 1:
        raise ValueError("it gives neighbours that are of no text two kinds")
    return types[0] if types else 0
