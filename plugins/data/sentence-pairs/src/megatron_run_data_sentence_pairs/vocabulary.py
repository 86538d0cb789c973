"""Needs of the samples from a tokenizer: its special tokens, which tokens begin a word, and which end a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run_engine.data import Tokenizer

#: The special tokens by their names in BERT's vocabulary: begin, separator, mask and padding.
SPECIAL = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
#: What ends a sentence, and what marks the tokens that begin a word where tokens carry a mark.
_ENDS, _MARKS = (".", "!", "?"), ("Ġ", "\u2581")
#: What marks the tokens that go on with a word in WordPiece.
_CONTINUES = "##"


@dataclass(frozen=True)
class PairVocabulary:
    """Ids of the special tokens; ``size`` of the vocabulary with them, ``plain`` without those that were added.

    ``begins`` and ``ends`` [size] are true for the tokens that begin a word, and that end a sentence.
    """

    begin: int
    separator: int
    mask: int
    padding: int
    end_of_document: int
    plain: int
    size: int
    begins: NDArray[np.bool_]
    ends: NDArray[np.bool_]


def pair_vocabulary(tokenizer: Tokenizer) -> PairVocabulary:
    """Those of ``tokenizer``; special tokens that it lacks get ids after its last."""
    ids, plain = tokenizer.vocabulary, tokenizer.vocab_size
    lacking = [name for name in SPECIAL if name not in ids]
    special = {name: plain + lacking.index(name) if name in lacking else ids[name] for name in SPECIAL}
    size = plain + len(lacking)
    begins, ends = np.ones(size, np.bool_), np.zeros(size, np.bool_)
    pieces = any(token.startswith(_CONTINUES) for token in ids)
    marked = any(token.startswith(_MARKS) for token in ids)
    for token, number in ids.items():
        if pieces:
            begins[number] = not token.startswith(_CONTINUES)
        elif marked:
            begins[number] = token.startswith(_MARKS)
        ends[number] = token in _ENDS
    begin, separator, mask, padding = (special[name] for name in SPECIAL)
    return PairVocabulary(begin, separator, mask, padding, tokenizer.end_of_document, plain, size, begins, ends)
