"""Questions as rows of tokens: ``[CLS] A [SEP] B [SEP]``, padded, and windows over contexts that are longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_run.errors import DataError, InputError
from megatron_run_data_nlu.questions import Choice, Question

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run_engine.data.tokenizer import Tokenizer

    Tokens = NDArray[np.int64]

#: Special tokens of a row.
SPECIALS = 3
#: The most tokens of a question of SQuAD (Devlin et al. 2018).
LONGEST_QUESTION = 64


class Reader:
    """Makes rows of ``length`` tokens with ``tokenizer``. Raises :class:`InputError` where it lacks special tokens."""

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        vocabulary, names = tokenizer.vocabulary, ("[CLS]", "[SEP]", "[PAD]")
        lacking = [name for name in names if name not in vocabulary]
        if lacking:
            raise InputError(
                f"the tokenizer has no {', '.join(lacking)}",
                why="data=nlu lays out its rows as BERT's",
                fix="set data.tokenizer to BERT's vocab.txt, or another that has them",
            )
        self._tokenizer, self.length = tokenizer, length
        self._begin, self._separator, self._padding = (vocabulary[name] for name in names)

    def places(self, text: str) -> tuple[Tokens, Tokens, Tokens]:
        """The tokens of ``text``, and the characters at which each begins and ends."""
        return self._tokenizer.encode_places(text)

    def pair(self, first: str, second: str) -> dict[str, Any]:
        """The row of two texts; of one that is too long, the longer text loses its end."""
        a, b = (self.places(text)[0] for text in (first, second))
        room = self.length - SPECIALS
        of_a = min(len(a), max(room - len(b), (room + 1) // 2))  # the longer one is cut, and both where both are long
        return self.row(a[:of_a], b[: room - of_a])

    def row(self, first: Tokens, second: Tokens) -> dict[str, Any]:
        """The fields of a row of two texts that fit."""
        end, used = len(first) + 2, len(first) + len(second) + SPECIALS
        tokens, types = np.full(self.length, self._padding, np.int64), np.zeros(self.length, np.int64)
        tokens[0], tokens[1 : end - 1], tokens[end - 1] = self._begin, first, self._separator
        tokens[end : used - 1], tokens[used - 1] = second, self._separator
        types[end:used] = 1
        return {"tokens": tokens, "token_types": types, "used": used}


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

    def __init__(self, questions: Sequence[Choice], reader: Reader) -> None:
        self.questions, self._reader = questions, reader

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Mapping[str, NDArray[Any]]:
        question = self.questions[index]
        return sample_of([self._reader.pair(*texts) for texts in question.rows], [question.answer])


@dataclass(frozen=True)
class Window:
    """Tokens ``first`` to ``stop`` - 1 of the context of question number ``question``, in a row from ``offset`` on."""

    question: int
    first: int
    stop: int
    offset: int


class Spans:
    """One sample for each window of each question; windows overlap by all but ``stride`` tokens."""

    def __init__(self, questions: Sequence[Question], reader: Reader, stride: int) -> None:
        self.questions, self._reader = questions, reader
        self.contexts: list[tuple[Tokens, Tokens, Tokens]] = []
        self._asked: list[Tokens] = []
        self.windows: list[Window] = []
        read: dict[str, tuple[Tokens, Tokens, Tokens]] = {}  # questions share contexts
        for number, question in enumerate(questions):
            context = read.setdefault(question.context, reader.places(question.context))
            asked = reader.places(question.question)[0][:LONGEST_QUESTION]
            self.contexts.append(context)
            self._asked.append(asked)
            self.windows += self._cut(number, len(context[0]), len(asked), stride)

    def _cut(self, number: int, size: int, asked: int, stride: int) -> list[Window]:
        room = self._reader.length - SPECIALS - asked
        if room < 1:
            raise DataError(
                f"the question {self.questions[number].name} leaves no token for its context",
                fix="raise train.sequence_length",
            )
        step = min(stride, room)
        firsts = range(0, max(1, size - room + step), step)
        return [Window(number, first, min(first + room, size), asked + 2) for first in firsts]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Mapping[str, NDArray[Any]]:
        window = self.windows[index]
        tokens = self.contexts[window.question][0][window.first : window.stop]
        row = self._reader.row(self._asked[window.question], tokens)
        return sample_of([row], self.ends(window))

    def ends(self, window: Window) -> tuple[int, int]:
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
