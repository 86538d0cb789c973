"""From logits of spans to answers: the best span over all windows of a question (Devlin et al. 2018, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run_data_nlu.rows import Spans, Window

#: The likeliest first and last tokens that are tried, and the most tokens of an answer, as in BERT's own script.
TRIED, LONGEST = 20, 30


def answers_of(spans: Spans, logits: NDArray[np.float32], *, may_lack: bool) -> dict[str, str]:
    """The answer to each question by its name, from logits [windows, s, 2] of first and last tokens.

    With ``may_lack`` it is empty where the first token of the row scores higher than every span of its window, in the
    window in which it scores lowest.
    """
    best: dict[int, tuple[float, str]] = {}
    none: dict[int, float] = {}
    for window, scores in zip(spans.windows, logits, strict=True):
        question = window.question
        none[question] = min(none.get(question, np.inf), float(scores[0].sum()))
        best.setdefault(question, (-np.inf, ""))
        for score, text in _spans(spans, window, scores):
            if score > best[question][0]:
                best[question] = score, text
    return {
        spans.questions[question].name: "" if may_lack and none[question] >= score else text
        for question, (score, text) in best.items()
    }


def _spans(spans: Spans, window: Window, scores: NDArray[np.float32]) -> Iterator[tuple[float, str]]:
    """The sum of the scores of both ends, and the text, of the likeliest spans of one window."""
    _, starts, stops = spans.contexts[window.question]
    context = spans.questions[window.question].context
    inside = scores[window.offset : window.offset + window.stop - window.first]  # [tokens, 2]
    firsts, lasts = (np.argsort(-inside[:, end], kind="stable")[:TRIED] for end in (0, 1))
    for first in firsts.tolist():
        for last in lasts.tolist():
            if first <= last < first + LONGEST:
                begin, end = starts[window.first + first], stops[window.first + last]
                yield float(inside[first, 0] + inside[last, 1]), context[begin:end]
