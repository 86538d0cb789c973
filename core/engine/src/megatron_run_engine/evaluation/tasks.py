"""The tasks on which a language model is evaluated: perplexity, WikiText-103 and LAMBADA.

A task turns the text of a file, or the samples of a split, into windows, and their scores into metrics. The model only
scores windows, so that a task works on any topology. Definitions: Megatron-LM paper, appendix E.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast, get_args

from megatron_run.contracts import EvalMetrics
from megatron_run.contracts.data import Split
from megatron_run.contracts.schema import TASKS, read_task
from megatron_run.errors import DataError, InputError
from megatron_run.errors.wording import did_you_mean
from megatron_run_engine.data.documents import NoTextError, find_documents
from megatron_run_engine.data.user_files import json_line, read_text, text_lines
from megatron_run_engine.evaluation.sample_losses import score_samples
from megatron_run_engine.runtime.generation.scoring import Score, Window, score, text_windows

if TYPE_CHECKING:
    from megatron_run.contracts import Dataset, DataSource
    from megatron_run_engine.runtime.generation import Network

#: Tokens that a window scores of WikiText-103 (appendix E.1).
WIKITEXT_STRIDE = 32
#: UTF-8 has at most 4 bytes in a character, before which may be a token of the space that a tokenizer adds.
_MOST_TOKENS_OF_A_CHARACTER = 5
#: How a model gets the tokenizer that its own data do not have.
_TOKENIZER = "--plugin data=text,tokenizer=FILE"


class Found(NamedTuple):
    """The mean loss in nats of the ``tokens`` that a task scored, and the task's metrics."""

    loss: float
    tokens: int
    metrics: Mapping[str, float]


#: Is told how many windows or samples are scored.
Tell = Callable[[int], object]


@dataclass(frozen=True)
class TextWork:
    """The windows of texts, and how a task's metrics follow from their scores, in the same order."""

    windows: Sequence[Window]
    metrics: Callable[[Sequence[Score]], Mapping[str, float]]

    def __len__(self) -> int:
        return len(self.windows)

    def score(self, network: Network, batch: int, tell: Tell | None) -> Found:
        """Score the windows, ``batch`` in a pass. Collective over the world."""
        scores = score(network, self.windows, batch, tell)
        return Found(_loss(scores), sum(each.targets for each in scores), self.metrics(scores))


@dataclass(frozen=True)
class SplitWork:
    """The samples of a split, scored as a training's evaluation scores them; ``note`` as a result's."""

    dataset: Dataset
    note: str = ""

    def __len__(self) -> int:
        return len(self.dataset)

    def score(self, network: Network, batch: int, tell: Tell | None) -> Found:
        """Score all samples, ``batch`` in a microbatch. Collective over the world."""
        loss, tokens = score_samples(network, self.dataset, range(len(self.dataset)), batch, progress=tell)
        return Found(loss, tokens, {"perplexity": perplexity_of(loss)})


#: What a task gives the model to score.
Work = TextWork | SplitWork


@dataclass(frozen=True)
class TaskResult:
    """``metrics`` of ``task`` on ``source``, a file or a split; ``loss`` is in nats per scored token.

    ``note`` is a line about what it is not comparable with, empty where there is nothing to say.
    """

    task: str
    source: str
    loss: float
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    def at_step(self, step: int) -> EvalMetrics:
        """The result as the observers of a run see it."""
        own = dict(self.metrics)
        return EvalMetrics(
            step, self.task, self.loss, own.pop("perplexity", perplexity_of(self.loss)), self.tokens, own
        )


class TextReader:
    """Encodes text for a model that reads ``longest`` tokens at once, with the tokenizer of ``data``.

    ``opens`` opens a split of the model's own data with ``seed``, its samples as long as those of its training; it is
    None where ``data`` is there for its tokenizer only. ``compare`` returns a line where these data are not those
    of the training.
    """

    def __init__(
        self,
        data: DataSource | None,
        longest: int,
        seed: int,
        vocab_size: int,
        opens: Callable[..., Dataset] | None = None,
        compare: Callable[[], str] = str,
    ) -> None:
        self.data, self.longest, self._seed, self._vocab_size, self._opens = data, longest, seed, vocab_size, opens
        self._compare = compare

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``. Raises :class:`DataError` if it cannot be text, or the model does not know one."""
        tokens = None if self.data is None else self.data.encode(text)
        if tokens is None:
            raise DataError("this model has no tokenizer", why="a task reads text", fix=f"name it: {_TOKENIZER}")
        strange = next((token for token in tokens if not 0 <= token < self._vocab_size), None)
        if strange is not None:
            raise DataError(
                f"the tokenizer writes token {strange}, the model has {self._vocab_size}",
                fix=f"name the tokenizer that the model was trained with: {_TOKENIZER}",
            )
        return list(tokens)

    def bytes_of_first(self, text: str, tokens: Sequence[int]) -> float:
        """How many bytes of ``text`` the first of its ``tokens`` stands for.

        Of a character that several tokens share, each stands for an equal part.
        """
        assert self.data is not None  # it has made the tokens
        pieces = [self.data.decode(tokens[: count + 1]) or "" for count in range(_MOST_TOKENS_OF_A_CHARACTER)]
        whole = (len(piece.encode()) / count for count, piece in enumerate(pieces, 1) if text.startswith(piece))
        return next(whole, len(pieces[0].encode()))

    def split(self, name: Split) -> SplitWork:
        """The work on the model's own data in the split ``name``. Raises :class:`DataError` without data."""
        if self._opens is None:
            raise DataError("this model came without data", why=f"{name} is a split of a run's own data")
        return SplitWork(self._opens(name, seed=self._seed), self._compare())


def perplexity(source: str, reader: TextReader, stride: int | None) -> Work:
    """Perplexity of text files, each read as one text, or of ``train``, ``validation`` or ``test`` of the run's data.

    Every token but the first of a text is scored. Without a stride windows do not overlap. Metrics: ``perplexity``, and
    for text ``bits_per_byte``, by the bytes of the tokens that are scored.
    """
    if _is_split(source):
        return reader.split(cast("Split", source))
    windows, size = list[Window](), 0.0
    for text in _texts(source):
        tokens = reader.encode(text)
        if len(tokens) > 1:
            windows += _windows(tokens, reader, stride or reader.longest)
            size += len(text.encode()) - reader.bytes_of_first(text, tokens)

    def metrics(scores: Sequence[Score]) -> dict[str, float]:
        bits = -math.fsum(each.logprob for each in scores) / math.log(2)
        return {"perplexity": perplexity_of(_loss(scores)), "bits_per_byte": bits / size}

    return TextWork(windows, metrics)


def _texts(source: str) -> Iterator[str]:
    """The texts of files: one each, or of JSON lines each line's. Raises :class:`DataError` that names the task."""
    try:
        for document in find_documents([source]):
            yield from document.texts() if document.has_records else (read_text(document.path),)
    except DataError as error:
        error.origin = f"perplexity={source}"
        error.fix = error.fix or did_you_mean(source, get_args(Split))
        if isinstance(error, NoTextError):
            error.fix = ""  # another plugin of the data helps a training only
        raise


def _is_split(source: str) -> bool:
    """Whether ``source`` names a split of the run's data; a file of that name comes first."""
    return source in get_args(Split) and not Path(source).exists()


def wikitext(source: str, reader: TextReader, stride: int | None) -> Work:
    """Word-level perplexity of WikiText-103's test set in its published form of tokens between spaces (appendix E.1).

    The text is first freed of what the tokenisation left in it; the sum of losses is divided by the number of original
    tokens. The first token of both kinds is not scored, and not counted. Metrics: ``perplexity`` by original tokens,
    ``token_ratio`` of the model's tokens to them.
    """
    raw = read_text(Path(source))
    original = len(raw.strip().split(" ")) - 1
    if not original:
        raise DataError(f"{source} has nothing to score", why="task wikitext counts the words after the first")
    windows = _windows(reader.encode(detokenize(raw)), reader, min(stride or WIKITEXT_STRIDE, reader.longest))

    def metrics(scores: Sequence[Score]) -> dict[str, float]:
        total = -math.fsum(each.logprob for each in scores)
        scored = sum(each.targets for each in scores)
        return {"perplexity": perplexity_of(total / original), "token_ratio": scored / original}

    return TextWork(windows, metrics)


def lambada(source: str, reader: TextReader, _: int | None) -> Work:
    """Cloze accuracy: the last word of each passage, right if every token of it is (appendix E.2, teacher forcing).

    ``source`` has a passage a line, as text or as JSON with the field ``text``. Metric: ``accuracy``.
    """
    windows = [_cloze(passage, reader) for passage in _passages(Path(source))]
    return TextWork(windows, lambda scores: {"accuracy": sum(each.greedy for each in scores) / len(scores)})


#: Is told a task, how many windows or samples it has, and how many of them are scored.
ReportProgress = Callable[[str, int, int], object]
#: Makes the work of a task from its source.
Maker = Callable[[str, TextReader, "int | None"], Work]
#: What makes the work of each of the kernel's ``TASKS``.
MAKERS: Mapping[str, Maker] = dict(zip(TASKS, (perplexity, wikitext, lambada), strict=True))


def check_files(tasks: Iterable[str]) -> None:
    """Raise :class:`DataError` where a file of ``NAME=SOURCE`` is missing, empty or no text. Nothing is scored.

    Raises :class:`InputError` for a task that is none.
    """
    for name, source in list(map(_named, tasks)):
        try:
            if name != "perplexity":
                read_text(Path(source))
            elif not _is_split(source):
                next(_texts(source), None)
        except DataError as error:
            error.origin = f"{name}={source}"
            raise


def _named(task: str) -> tuple[str, str]:
    try:
        return read_task(task)
    except ValueError as error:
        raise InputError(str(error)) from error


def make_work(task: str, reader: TextReader, stride: int | None = None) -> tuple[str, str, Work]:
    """Name, source and windows of ``NAME=SOURCE``; ``stride`` tokens are scored in a window, None for the task's own.

    Raises :class:`InputError` for an unknown task, :class:`DataError` for what cannot be read or scored.
    """
    name, source = _named(task)
    work = MAKERS[name](source, reader, stride)
    if not len(work):
        raise DataError(f"{source} has nothing to score", why=f"task {name} found no token after another one")
    return name, source, work


def run_task(
    name: str, source: str, work: Work, network: Network, batch: int = 8, progress: ReportProgress | None = None
) -> TaskResult:
    """Score a task, ``batch`` windows or samples in a pass. Collective over the world."""
    tell = partial(progress, f"{name}={source}", len(work)) if progress else None
    note = work.note if isinstance(work, SplitWork) else ""
    return TaskResult(name, source, *work.score(network, batch, tell), note)


def _loss(scores: Sequence[Score]) -> float:
    return -math.fsum(each.logprob for each in scores) / sum(each.targets for each in scores)


def perplexity_of(loss: float) -> float:
    """The perplexity of a mean loss in nats; finite, since exp overflows a double above 709."""
    return math.exp(min(loss, 700.0))


def _windows(tokens: Sequence[int], reader: TextReader, stride: int) -> list[Window]:
    if not 1 <= stride <= reader.longest:
        raise InputError(f"stride {stride}: it must be from 1 to the model's {reader.longest} positions")
    return text_windows(tokens, reader.longest, stride)


def _passages(path: Path) -> list[str]:
    """The passages of a file, a line each. Raises :class:`DataError` with the line of one that is no passage."""
    passages = []
    for number, line in text_lines(path):
        if not line.strip():
            continue
        passage = _json_text(line, path, number) if line.lstrip().startswith("{") else line
        if len(passage.split()) < 2:
            raise DataError(f"line {number} of {path} has no word to guess", why="it needs at least two words")
        passages.append(passage)
    return passages


def _json_text(line: str, path: Path, number: int) -> str:
    try:
        text = json_line(line)["text"]
    except (ValueError, KeyError) as cause:
        raise DataError(
            f"line {number} of {path} is no passage", why="JSON with the field 'text' is expected"
        ) from cause
    try:
        str(text).encode()
    except UnicodeEncodeError as cause:
        why = f"half of a surrogate pair is at its character {cause.start}"
        raise DataError(f"line {number} of {path} is no text", why=why) from cause
    return str(text)


def _cloze(passage: str, reader: TextReader) -> Window:
    """The window that scores the tokens of the last word: those in which the passage differs from its context alone.

    Both are encoded from their beginning, since a tokenizer may treat the first word of a text unlike the others.
    Raises :class:`DataError` for a word that has no token.
    """
    passage = passage.strip()
    context = passage.rsplit(maxsplit=1)[0]
    whole, before = reader.encode(passage), reader.encode(context)
    pairs = enumerate(zip(whole, before, strict=False))
    shared = next((place for place, (one, other) in pairs if one != other), len(before))
    if shared >= len(whole):
        raise DataError(f"the last word of {passage!r} has no token", why="the tokenizer leaves it out")
    if len(whole) == 1:
        raise DataError(f"the last word of {passage!r} has nothing before it", why="one token is all of it")
    return Window.ending(whole, len(whole) - shared, reader.longest)


#: What WikiText's tokenisation did to its texts, as pattern and original.
_WIKITEXT: Sequence[tuple[re.Pattern[str], str]] = tuple(
    (re.compile(pattern), original)
    for pattern, original in (
        (r" @([-,.])@ ", r"\1"),  # inside of numbers and words: 1 @,@ 000, role @-@ playing
        (r" ([:;,.!?])(?= )", r"\1"),
        (r" n't", "n't"),
        (r" '(s|re|ve|ll|d|m)\b", r"'\1"),
        (r"(?<=s) '(?= )", "'"),
        (r"([(\[{]) ", r"\1"),
        (r" ([)\]}])", r"\1"),
        (r'" ([^"\n]*?) "', r'"\1"'),
        (r"([$£€#]) (?=\d)", r"\1"),
        (r"(?<=\d) (%|°)", r"\1"),
        (r"= (?==)", "="),  # = = heading = =
        (r" \n", "\n"),
        (r"\n ", "\n"),
    )
)


def detokenize(text: str) -> str:
    """WikiText's text without the traces of its tokenisation: spaces around punctuation, ``@-@``, apart ``'s``."""
    for pattern, original in _WIKITEXT:
        text = pattern.sub(original, text)
    return text
