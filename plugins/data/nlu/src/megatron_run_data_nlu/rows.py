"""Questions as rows of tokens, two texts as their tokenizer lays them out, and windows over longer contexts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_run.errors import DataError, InputError
from megatron_run_data_nlu.questions import Choice, Question
from megatron_run_engine.data import PairLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run_engine.data import Tokenizer

    Tokens = NDArray[np.int64]

#: The most tokens of a question of SQuAD (Devlin et al. 2018).
LONGEST_QUESTION = 64


class RowMaker:
    """Makes rows of ``length`` tokens with ``tokenizer``: as its post-processor does, or without one as BERT's.

    Raises :class:`InputError` where it lacks special tokens, or a row has nothing to be judged by or to part its texts.
    """

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self._tokenizer, self.length = tokenizer, length
        self.layout = tokenizer.pair_layout() or _berts(tokenizer)
        for part in ("before", "between"):
            if not getattr(self.layout, part):
                raise InputError(
                    f"the tokenizer puts no token {part} two texts",
                    why="a task is answered at the first token, and its texts are told apart by one",
                    fix="set data.tokenizer to one with a post_processor for pairs, as BERT's and RoBERTa's",
                )
        padding = tokenizer.special.get("pad_token", "[PAD]")
        (self._padding,) = _ids(tokenizer, padding)

    def places(self, text: str) -> tuple[Tokens, Tokens, Tokens]:
        """The tokens of ``text``, and the characters at which each begins and ends."""
        return self._tokenizer.encode_places(text)

    def pair(self, first: str, second: str) -> dict[str, Any]:
        """The row of two texts; of one that is too long, the longer text loses its end."""
        a, b = (self.places(text)[0] for text in (first, second))
        room = self.length - self.layout.size
        of_a, of_b = len(a), len(b)
        if of_a + of_b > room:  # as transformers: the longer one is cut, and both where both are long
            shorter = min(of_a, of_b, room // 2)
            of_a, of_b = (shorter, room - shorter) if of_a <= of_b else (room - shorter, shorter)
        return self.row(a[:of_a], b[:of_b])

    def row(self, first: Sequence[int] | Tokens, second: Sequence[int] | Tokens) -> dict[str, Any]:
        """The fields of a row of two texts that fit."""
        parts = (self.layout.before, first, self.layout.between, second, self.layout.after)
        sizes = [len(part) for part in parts]
        used = sum(sizes)
        tokens, types = np.full(self.length, self._padding, np.int64), np.zeros(self.length, np.int64)
        tokens[:used] = np.concatenate([np.asarray(part, np.int64) for part in parts])
        types[:used] = np.repeat(self.layout.types, sizes)
        return {"tokens": tokens, "token_types": types, "used": used}


def _berts(tokenizer: Tokenizer) -> PairLayout:
    """BERT's layout, of a tokenizer that does not say one, such as ``vocab.txt``."""
    begin, separator = _ids(tokenizer, "[CLS]", "[SEP]")
    return PairLayout((begin,), (separator,), (separator,))


def _ids(tokenizer: Tokenizer, *names: str) -> list[int]:
    """The ids of special tokens. Raises :class:`InputError` for those that ``tokenizer`` lacks."""
    vocabulary = tokenizer.vocabulary
    lacking = [name for name in names if name not in vocabulary]
    if lacking:
        raise InputError(
            f"the tokenizer has no {', '.join(lacking)}",
            why="data=nlu lays out its rows by it",
            fix="set data.tokenizer to BERT's vocab.txt, or a folder whose tokenizer lays out pairs of texts",
        )
    return [vocabulary[name] for name in names]


def sample_of(rows: Sequence[Mapping[str, Any]], labels: Sequence[int]) -> dict[str, NDArray[Any]]:
    """The sample of one or several ``rows``, whose first labels are ``labels``."""
    length = len(rows[0]["tokens"])
    every, mask = np.zeros(length * len(rows), np.int64), np.zeros(length * len(rows), np.float32)
    every[: len(labels)], mask[: len(labels)] = labels, 1.0
    bounds = [0]
    for number, row in enumerate(rows):
        bounds += [number * length + row["used"], (number + 1) * length]
    return {
        "tokens": np.concatenate([row["tokens"] for row in rows]),
        "labels": every,
        "loss_mask": mask,
        "token_types": np.concatenate([row["token_types"] for row in rows]),
        "documents": np.array(bounds, np.int64),
    }


class Choices:
    """One sample for each question with classes or choices; tokenised when it is read."""

    def __init__(self, questions: Sequence[Choice], maker: RowMaker) -> None:
        self.questions, self._maker = questions, maker

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Mapping[str, NDArray[Any]]:
        question = self.questions[index]
        return sample_of([self._maker.pair(*texts) for texts in question.rows], [question.answer])


@dataclass(frozen=True)
class ContextWindow:
    """Tokens ``first`` to ``stop`` - 1 of the context of question number ``question``, in a row from ``offset`` on."""

    question: int
    first: int
    stop: int
    offset: int


class Spans:
    """One sample for each window of each question; windows overlap by all but ``stride`` tokens."""

    def __init__(self, questions: Sequence[Question], maker: RowMaker, stride: int) -> None:
        self.questions, self._maker = questions, maker
        self.contexts: list[tuple[Tokens, Tokens, Tokens]] = []
        self._asked: list[Tokens] = []
        self.windows: list[ContextWindow] = []
        read: dict[str, tuple[Tokens, Tokens, Tokens]] = {}  # questions share contexts
        for number, question in enumerate(questions):
            context = read.setdefault(question.context, maker.places(question.context))
            asked = maker.places(question.question)[0][:LONGEST_QUESTION]
            self.contexts.append(context)
            self._asked.append(asked)
            self.windows += self._cut(number, len(context[0]), len(asked), stride)

    def _cut(self, number: int, size: int, asked: int, stride: int) -> list[ContextWindow]:
        layout = self._maker.layout
        room, offset = self._maker.length - layout.size - asked, len(layout.before) + asked + len(layout.between)
        if room < 1:
            raise DataError(
                f"the question {self.questions[number].name} leaves no token for its context",
                fix="raise train.sequence_length",
            )
        step = min(stride, room)
        firsts = range(0, max(1, size - room + step), step)
        return [ContextWindow(number, first, min(first + room, size), offset) for first in firsts]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Mapping[str, NDArray[Any]]:
        window = self.windows[index]
        tokens = self.contexts[window.question][0][window.first : window.stop]
        row = self._maker.row(self._asked[window.question], tokens)
        return sample_of([row], self.ends(window))

    def ends(self, window: ContextWindow) -> tuple[int, int]:
        """The places in a row of the first and last token of the first answer; 0, 0 where the window has it not."""
        question = self.questions[window.question]
        if not question.answers:
            return 0, 0
        text, begin = question.answers[0]
        _, starts, stops = self.contexts[window.question]
        inside = np.flatnonzero((stops > begin) & (starts < begin + len(text)))
        if not len(inside) or inside[0] < window.first or inside[-1] >= window.stop:
            return 0, 0
        shift = window.offset - window.first
        return int(inside[0]) + shift, int(inside[-1]) + shift
