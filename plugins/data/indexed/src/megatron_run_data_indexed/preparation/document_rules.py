"""Documents that a corpus is better without: too short or long, in other languages, of a test set, near duplicates.

The rules are those with which the Megatron-LM paper made its corpus (Shoeybi et al. 2019, section 4.1): documents under
128 tokens go, and so do near duplicates by locality-sensitive hashing at a Jaccard similarity of 0.7.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np

from megatron_run.errors import InputError
from megatron_run.errors.install_hint import how_to_add
from megatron_run.errors.wording import did_you_mean
from megatron_run_data_indexed.preparation.near_duplicates import Duplicates, shingles
from megatron_run_data_indexed.preparation.workers import process_pool
from megatron_run_engine.data import NGRAM_WORDS, ngrams

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The characters of a document by which its language is told.
_PROBE = 2000
#: Documents that a worker process gets at once.
_BATCH = 256


@dataclass(frozen=True)
class Rules:
    """The rules by which a document stays."""

    min_tokens: int = 128
    max_tokens: int | None = None
    #: The only languages that stay, by their ISO 639-1 codes; empty: all do.
    languages: frozenset[str] = frozenset()
    #: A document goes that shares so many n-grams, of ``ngram`` words, with a test set.
    shared: int = 1
    ngram: int = NGRAM_WORDS
    #: A document goes whose similarity to an earlier one is at least this, from 0 to 1; None: duplicates stay.
    similarity: float | None = 0.7


class Document(Protocol):
    """A text and the name under which it is told of."""

    @property
    def name(self) -> str:
        """Where it came from."""
        ...

    @property
    def text(self) -> str:
        """All of it."""
        ...


Doc = TypeVar("Doc", bound=Document)


class Verdict(NamedTuple):
    """The verdict on a document: it stays if ``rule`` is empty, else that rule removed it for the reason ``why``."""

    tokens: int
    rule: str = ""
    why: str = ""


class Features(NamedTuple):
    """The examination of a document alone: a verdict, and where it stays the hashes of its shingles."""

    verdict: Verdict
    hashes: NDArray[np.uint64]


class Examiner:
    """The rules that look at one document alone. ``count`` gives the number of tokens of each of many texts."""

    def __init__(
        self, rules: Rules, count: Callable[[Sequence[str]], Sequence[int]], tests: frozenset[str] = frozenset()
    ) -> None:
        self._rules, self._count, self._tests = rules, count, tests

    def examine(self, texts: Sequence[str]) -> list[Features]:
        """Return a verdict for each of ``texts``."""
        verdicts = [self._verdict(text, tokens) for text, tokens in zip(texts, self._count(texts), strict=True)]
        kept = [text if not verdict.rule else "" for text, verdict in zip(texts, verdicts, strict=True)]
        hashes = shingles(kept) if self._rules.similarity is not None else [np.empty(0, np.uint64)] * len(texts)
        return [Features(*each) for each in zip(verdicts, hashes, strict=True)]

    def _verdict(self, text: str, tokens: int) -> Verdict:
        rules = self._rules
        if tokens < rules.min_tokens:
            return Verdict(tokens, "short", f"{tokens} tokens")
        if rules.max_tokens is not None and tokens > rules.max_tokens:
            return Verdict(tokens, "long", f"{tokens} tokens")
        if rules.languages and (language := _language(text)) not in rules.languages:
            return Verdict(tokens, "language", language)
        if self._tests and (found := self._in_tests(text)):
            return Verdict(tokens, "test set", found)
        return Verdict(tokens)

    def _in_tests(self, text: str) -> str:
        """The first n-gram that the text shares with a test set, if it shares enough of them; else nothing."""
        found = dict.fromkeys(gram for gram in ngrams(text, self._rules.ngram) if gram in self._tests)
        return next(iter(found)) if len(found) >= self._rules.shared else ""


def ngrams_of(texts: Iterable[str], size: int = NGRAM_WORDS) -> frozenset[str]:
    """Every ``size`` successive words of the test sets ``texts``."""
    return frozenset(gram for text in texts for gram in ngrams(text, size))


def judge(
    documents: Iterable[Doc], rules: Rules, examiner: Callable[[], Examiner], workers: int = 1
) -> Iterator[tuple[Doc, Verdict]]:
    """Return each of ``documents`` with its verdict, in their order: of duplicates the first one stays.

    ``examiner`` makes what looks at documents alone, once in each of ``workers`` processes, so it can be pickled. The
    verdicts do not depend on ``workers``. Raises :class:`InputError` without the libraries of the extra ``clean``.
    """
    _require_libraries(rules)
    if rules.similarity is None:
        for batch, seen in _examined(documents, examiner, workers):
            yield from ((document, each.verdict) for document, each in zip(batch, seen, strict=True))
        return
    with Duplicates(rules.similarity) as duplicates:
        for batch, seen in _examined(documents, examiner, workers):
            pairs = list(zip(batch, seen, strict=True))
            found = iter(duplicates.add([(doc.name, each.hashes) for doc, each in pairs if not each.verdict.rule]))
            for document, (verdict, _) in pairs:
                match = None if verdict.rule else next(found)
                yield document, verdict if match is None else _duplicate(verdict.tokens, *match)


def _duplicate(tokens: int, name: str, similarity: float) -> Verdict:
    return Verdict(tokens, "duplicate", f"{similarity:.2f} of {name}")


def _examined(
    documents: Iterable[Doc], examiner: Callable[[], Examiner], workers: int
) -> Iterator[tuple[list[Doc], list[Features]]]:
    """The documents in batches, with what is seen of each; at most two batches a worker are in memory."""
    stream = iter(documents)
    batches = iter(lambda: list(islice(stream, _BATCH)), [])
    alone = examiner()  # here first, whatever fails in it: a worker of a pool that cannot begin says nothing
    if workers == 1:
        for batch in batches:
            yield batch, alone.examine([document.text for document in batch])
        return
    # Not forked: rensa's threads do not survive a fork.
    with process_pool(workers, _start_worker, examiner) as pool:
        under_way: deque[tuple[list[Doc], Future[list[Features]]]] = deque()
        for batch in batches:
            under_way.append((batch, pool.submit(_examine_here, [document.text for document in batch])))
            if len(under_way) >= 2 * workers:
                first, result = under_way.popleft()
                yield first, result.result()
        for first, result in under_way:
            yield first, result.result()


#: What this worker process keeps between its tasks: its examiner.
_KEPT: dict[str, Examiner] = {}


def _start_worker(examiner: Callable[[], Examiner]) -> None:
    _KEPT["examiner"] = examiner()


def _examine_here(texts: Sequence[str]) -> list[Features]:
    return _KEPT["examiner"].examine(texts)


def _language(text: str) -> str:
    """The ISO 639-1 code of the likeliest language."""
    from py3langid import classify

    return str(classify(text[:_PROBE])[0])


def _require_libraries(rules: Rules) -> None:
    """Raise :class:`InputError` if a rule's library is missing, or a language is none that is known."""
    needed = {"rensa": rules.similarity is not None, "py3langid": bool(rules.languages)}
    for library in (name for name, wanted in needed.items() if wanted and find_spec(name) is None):
        raise InputError(f"{library} is not installed", fix=how_to_add("megatron-run-data-indexed", "clean"))
    if rules.languages:
        from py3langid import rank

        known = {language for language, _score in rank("")}
        for language in sorted(rules.languages - set(known)):
            raise InputError(f"{language!r} is no language that is known", fix=did_you_mean(language, known))
