"""The tasks on which a language model is evaluated: perplexity, WikiText-103 and LAMBADA.

A task turns the text of a file, or the samples of a split, into windows, and their scores into metrics. The model only
scores windows, so that a task works on any topology. Definitions: Megatron-LM paper, appendix E.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from megatron_run.contracts import EvalMetrics
from megatron_run.contracts.data import Split
from megatron_run.contracts.schema import TASKS, read_task
from megatron_run.errors import DataError, InputError
from megatron_run.safe_folder import parse_json
from megatron_run_engine.data.documents import Document, find_documents
from megatron_run_engine.runtime.generation.scoring import IGNORED, Score, Window, score, text_windows

if TYPE_CHECKING:
    from megatron_run.contracts import DataSource
    from megatron_run_engine.runtime.generation import Network

#: Tokens that a window scores of WikiText-103 (appendix E.1).
WIKITEXT_STRIDE = 32
#: How a model gets the tokenizer that its own data do not have.
_TOKENIZER = "--plugin data=text,tokenizer=FILE"


@dataclass(frozen=True)
class Work:
    """What a task gives the model to score, and how its metrics follow from the scores, in the same order."""

    windows: Sequence[Window]
    metrics: Callable[[Sequence[Score]], Mapping[str, float]]


@dataclass(frozen=True)
class TaskResult:
    """``metrics`` of ``task`` on ``source``, a file or a split; ``loss`` is in nats per scored token."""

    task: str
    source: str
    loss: float
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    def at_step(self, step: int) -> EvalMetrics:
        """The result as the observers of a run see it."""
        own = dict(self.metrics)
        return EvalMetrics(
            step, self.task, self.loss, own.pop("perplexity", perplexity_of(self.loss)), self.tokens, own
        )


class Reader:
    """Encodes text for a model that reads ``longest`` tokens at once, with the tokenizer of ``data``.

    ``sample_length`` is that of the samples, None where ``data`` is there for its tokenizer only.
    """

    def __init__(
        self, data: DataSource | None, longest: int, seed: int, vocab_size: int, sample_length: int | None = None
    ) -> None:
        self.data, self.longest, self._seed, self._vocab_size = data, longest, seed, vocab_size
        self._sample_length = sample_length

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

    def split(self, name: Split) -> list[Window]:
        """Every sample of the model's own data in the split ``name``. Raises :class:`DataError` without data."""
        if self.data is None or self._sample_length is None:
            raise DataError("this model came without data", why=f"{name} is a split of a run's own data")
        dataset = self.data.dataset(name, self._sample_length, self._seed)
        return [_sample(dataset[number]) for number in range(len(dataset))]


def _sample(sample: Mapping[str, object]) -> Window:
    tokens, labels, mask = (cast("Sequence[float]", sample[name]) for name in ("tokens", "labels", "loss_mask"))
    targets = [int(label) if counts else IGNORED for label, counts in zip(labels, mask, strict=True)]
    return Window([int(token) for token in tokens], targets)


def perplexity(source: str, reader: Reader, stride: int | None) -> Work:
    """Perplexity of text files, each read as one text, or of ``train``, ``validation`` or ``test`` of the run's data.

    Every token but the first of a text is scored. Without a stride windows do not overlap. Metrics: ``perplexity``, and
    for text ``bits_per_byte``.
    """
    if source in get_args(Split) and not Path(source).exists():
        return Work(reader.split(cast("Split", source)), lambda scores: {"perplexity": perplexity_of(_loss(scores))})
    texts = [_text(document.path) for document in _documents(source)]
    windows = [window for text in texts for window in _windows(text, reader, stride or reader.longest)]
    size = sum(len(text.encode()) for text in texts)

    def metrics(scores: Sequence[Score]) -> dict[str, float]:
        bits = -math.fsum(each.logprob for each in scores) / math.log(2)
        return {"perplexity": perplexity_of(_loss(scores)), "bits_per_byte": bits / size}

    return Work(windows, metrics)


def _documents(source: str) -> tuple[Document, ...]:
    try:
        return find_documents([source])
    except DataError as error:
        error.origin = f"perplexity={source}"
        raise


def wikitext(source: str, reader: Reader, stride: int | None) -> Work:
    """Word-level perplexity of WikiText-103's test set in its published form of tokens between spaces (appendix E.1).

    The text is first freed of what the tokenisation left in it; the sum of losses is divided by the number of original
    tokens. Metrics: ``perplexity`` by original tokens, ``token_ratio`` of the model's tokens to them.
    """
    raw = _text(Path(source))
    original = len(raw.strip().split(" "))
    windows = _windows(detokenize(raw), reader, min(stride or WIKITEXT_STRIDE, reader.longest))

    def metrics(scores: Sequence[Score]) -> dict[str, float]:
        total = -math.fsum(each.logprob for each in scores)
        scored = sum(each.targets for each in scores)
        return {"perplexity": perplexity_of(total / original), "token_ratio": scored / original}

    return Work(windows, metrics)


def lambada(source: str, reader: Reader, _: int | None) -> Work:
    """Cloze accuracy: the last word of each passage, right if every token of it is (appendix E.2, teacher forcing).

    ``source`` has a passage a line, as text or as JSON with the field ``text``. Metric: ``accuracy``.
    """
    windows = [_cloze(passage, reader) for passage in _passages(Path(source))]
    return Work(windows, lambda scores: {"accuracy": sum(each.greedy for each in scores) / len(scores)})


#: Is told a task, how many windows it has, and how many of them are scored.
ReportProgress = Callable[[str, int, int], object]
#: Makes the work of a task from its source.
Maker = Callable[[str, Reader, "int | None"], Work]
#: What makes the work of each of the kernel's ``TASKS``.
MAKERS: Mapping[str, Maker] = dict(zip(TASKS, (perplexity, wikitext, lambada), strict=True))


def check_files(tasks: Iterable[str]) -> None:
    """Raise :class:`DataError` where a file of ``NAME=SOURCE`` is missing, empty or no text. Nothing is scored."""
    for name, source in map(read_task, tasks):
        try:
            if name != "perplexity":
                _text(Path(source))
            elif source not in get_args(Split):
                find_documents([source])
        except DataError as error:
            error.origin = f"{name}={source}"
            raise


def make_work(task: str, reader: Reader, stride: int | None = None) -> tuple[str, str, Work]:
    """Name, source and windows of ``NAME=SOURCE``; ``stride`` tokens are scored in a window, None for the task's own.

    Raises :class:`InputError` for an unknown task, :class:`DataError` for what cannot be read or scored.
    """
    try:
        name, source = read_task(task)
    except ValueError as error:
        raise InputError(str(error)) from error
    work = MAKERS[name](source, reader, stride)
    if not any(target != IGNORED for window in work.windows for target in window.targets):
        raise DataError(f"{source} has nothing to score", why=f"task {name} found no token after another one")
    return name, source, work


def run_task(
    name: str, source: str, work: Work, network: Network, batch: int = 8, progress: ReportProgress | None = None
) -> TaskResult:
    """Score a task, ``batch`` windows in a pass. Collective over the world."""
    tell = partial(progress, f"{name}={source}", len(work.windows)) if progress else None
    scores = score(network, work.windows, batch, tell)
    return TaskResult(name, source, _loss(scores), sum(each.targets for each in scores), work.metrics(scores))


def _loss(scores: Sequence[Score]) -> float:
    return -math.fsum(each.logprob for each in scores) / sum(each.targets for each in scores)


def perplexity_of(loss: float) -> float:
    """The perplexity of a mean loss in nats; finite, since exp overflows a double above 709."""
    return math.exp(min(loss, 700.0))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as cause:
        raise DataError(f"{path} cannot be read", why=cause.strerror or str(cause)) from cause
    except UnicodeDecodeError as cause:
        raise DataError(f"{path} is no text", why=f"byte {cause.start} is not UTF-8") from cause


def _windows(text: str, reader: Reader, stride: int) -> list[Window]:
    if not 1 <= stride <= reader.longest:
        raise InputError(f"stride {stride}: it must be from 1 to the model's {reader.longest} positions")
    return text_windows(reader.encode(text), reader.longest, stride)


def _passages(path: Path) -> list[str]:
    """The passages of a file, a line each. Raises :class:`DataError` with the line of one that is no passage."""
    passages = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        passage = _json_text(line, path, number) if line.lstrip().startswith("{") else line
        if len(passage.split()) < 2:
            raise DataError(f"line {number} of {path} has no word to guess", why="it needs at least two words")
        passages.append(passage)
    return passages


def _json_text(line: str, path: Path, number: int) -> str:
    try:
        text = parse_json(line)["text"]
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


def _cloze(passage: str, reader: Reader) -> Window:
    """The window that scores the last word. It is encoded apart, so that no token reaches across into it."""
    context, word = passage.strip().rsplit(maxsplit=1)
    before, target = reader.encode(context), reader.encode(f" {word}")
    tokens = [*before, *target][-(reader.longest + 1) :]
    return Window.of(tokens, max(1, len(tokens) - len(target)))


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
