"""From logits of spans to answers, and the metrics of the tasks as their official scripts define them, in percent."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run_data_nlu.rows import ContextWindow, Spans

#: The likeliest first and last tokens that are tried, and the most tokens of an answer, as in BERT's own script.
TRIED, LONGEST = 20, 30
_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = frozenset(string.punctuation)


def answers_of(spans: Spans, logits: NDArray[np.float32], *, may_lack: bool) -> dict[str, str]:
    """The answer to each question by its name, from logits [windows, s, 2] of first and last tokens.

    It is the best span over all windows of the question (Devlin et al. 2018, section 4.2). With ``may_lack`` it is
    empty where the first token of the row scores higher than every span of its window, in the window in which it scores
    lowest.
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


def _spans(spans: Spans, window: ContextWindow, scores: NDArray[np.float32]) -> Iterator[tuple[float, str]]:
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


def accuracy(found: NDArray[np.int64], right: NDArray[np.int64], groups: Sequence[str]) -> dict[str, float]:
    """The share of right numbers, [n]; of each group as well where there are several."""
    hits = found == right
    metrics = {"accuracy": 100 * float(hits.mean())}
    for group in sorted(set(groups)) if len(set(groups)) > 1 else ():
        metrics[f"accuracy_{group}"] = 100 * float(hits[np.array(groups) == group].mean())
    return metrics


def binary_f1(found: NDArray[np.int64], right: NDArray[np.int64]) -> float:
    """The harmonic mean of precision and recall of class 1, as of scikit-learn's ``f1_score``; 0 without a hit."""
    hits = int(((found == 1) & (right == 1)).sum())
    return 200 * hits / (int((found == 1).sum()) + int((right == 1).sum())) if hits else 0.0


def normalised(answer: str) -> str:
    """An answer in small letters, without punctuation, articles and more than single spaces (SQuAD's script)."""
    bare = "".join(letter for letter in answer.lower() if letter not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(found: str, right: str) -> float:
    """1 where both answers are the same once normalised, else 0."""
    return float(normalised(found) == normalised(right))


def word_f1(found: str, right: str, *, may_lack: bool = True) -> float:
    """The harmonic mean of precision and recall of words.

    Where an answer is empty it is 1 if both are and a question ``may_lack`` an answer, else 0.
    """
    answer, reference = normalised(found).split(), normalised(right).split()
    if not answer or not reference:
        return float(may_lack and answer == reference)
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference))


def squad(found: Mapping[str, str], right: Mapping[str, Sequence[str]], *, may_lack: bool = True) -> dict[str, float]:
    """Exact match and F1 of the answers ``found`` by question, each against the nearest of those that are ``right``.

    With ``may_lack`` as of SQuAD 2.0 (evaluate-v2.0.py): a question without an answer is answered by an empty text, and
    answers that are empty once normalised do not count as answers. Else as of 1.1 (evaluate-v1.1.py).
    """
    exact = f1 = 0.0
    for question, answers in right.items():
        counted = [answer for answer in answers if normalised(answer)] or [""] if may_lack else answers
        exact += max(exact_match(found[question], answer) for answer in counted)
        f1 += max(word_f1(found[question], answer, may_lack=may_lack) for answer in counted)
    return {"exact_match": 100 * exact / len(right), "f1": 100 * f1 / len(right)}
