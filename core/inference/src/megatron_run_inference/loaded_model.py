"""The model that a user of Python holds, one that can be called, and that writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_run.errors import DataError, InputError
from megatron_run_engine.data.chat_template.of_source import is_silent
from megatron_run_engine.data.chat_template.prompt import ChatPrompts
from megatron_run_engine.data.contents import contents_hash
from megatron_run_engine.evaluation.tasks import TaskResult, TextReader, make_work, run_task
from megatron_run_engine.runtime.generation import Generation, TextTokens
from megatron_run_engine.training.checked_plugins import open_split
from megatron_run_inference.network import build_network
from megatron_run_inference.stepping import Stepper
from megatron_run_inference.text_stream import Completion, TextStream
from megatron_run_inference.writing import Prompt, Writing

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import DataSource
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.evaluation.tasks import ReportProgress
    from megatron_run_engine.run_folder.history import History
    from megatron_run_engine.runtime.generation import Network
    from megatron_run_engine.runtime.world import World
    from megatron_run_inference.source import Source


class LoadedModel:
    """A model with its weights, in evaluation mode. ``source`` says where it came from, ``run`` how it is split.

    ``network`` is this rank's part of it, ``data`` the source whose tokenizer is the model's, None without one.
    Every rank of a model that is split calls the same methods with the same arguments.
    """

    network: Network
    data: DataSource | None

    def __init__(self, run: ResolvedRun, source: Source, world: World, **building: Any) -> None:
        self.run, self.source = run, source
        self.network, self.data = build_network(run, source, world, **building)
        self._stepper: Stepper | None = None

    def __repr__(self) -> str:
        return f"LoadedModel({str(self.source.path)!r}, vocabulary={self.vocab_size}, positions={self.positions})"

    @property
    def history(self) -> History:
        """The numbers of the run that trained it, as far as they are beside it; its ``plot`` draws them."""
        from megatron_run_engine.run_folder.history import History

        return History(self.source.home)

    @property
    def vocab_size(self) -> int:
        """Token ids of the model."""
        return self.network.context.vocab_size

    @property
    def positions(self) -> int:
        """The most tokens that the model reads at once."""
        return self.network.positions

    def __call__(self, tokens: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """Logits after each of ``tokens`` [b, s]: fp32 [b, s, v], the same on every rank.

        Raises :class:`InputError` for a table that is empty or has other axes, for more tokens than ``positions``, and
        for an id outside the vocabulary.
        """
        table = torch.as_tensor(tokens, dtype=torch.int64, device=self.network.context.device)
        if table.ndim != 2 or not table.numel():
            raise InputError(f"tokens of shape {list(table.shape)}: [texts, tokens] is expected")
        for row in table.tolist():
            check_tokens(self, row)
        logits = self.network.logits(table)
        if logits is None:  # another stage has them
            logits = torch.empty(*table.T.shape, self.vocab_size, device=table.device)
        return self.network.share(logits.contiguous()).transpose(0, 1)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``. Raises :class:`DataError` without a tokenizer."""
        tokens = None if self.data is None else self.data.encode(text)
        if tokens is None:
            raise DataError(
                f"{self.source.path} has no tokenizer",
                why="the model was trained on tokens that are no text" if self.data else "only its weights lie there",
                fix="name its tokenizer, --plugin data=text,tokenizer=FILE, or give token ids, --tokens '1 2 3'",
            )
        return list(tokens)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of ``text`` as the model is given it, as transformers gives it: Llama's begin with a token.

        Raises :class:`DataError` without a tokenizer.
        """
        tokens = self.encode(text)
        given = None if self.data is None else self.data.encode_prompt(text)
        return tokens if given is None else list(given)

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens at which a text ends: those that the model came with, else its tokenizer's."""
        if self.source.ends is not None:
            return frozenset(self.source.ends)
        end = None if self.data is None else self.data.end_of_text
        return frozenset() if end is None else frozenset({end})

    def silent_stops(self, stops: Sequence[str]) -> list[tuple[int, ...]]:
        """The tokens of those ``stops`` that hold one without text, such as ``<|im_end|>``, which no text shows."""
        data = self.data
        found = [self.encode(stop) for stop in stops]
        return [] if data is None else [tuple(stop) for stop in found if any(is_silent(data, each) for each in stop)]

    def decode(self, tokens: Sequence[int]) -> str | None:
        """The text of ``tokens``, None without a tokenizer."""
        return None if self.data is None else self.data.decode(tokens)

    def generate(self, prompts: str | Sequence[Prompt], **options: Any) -> list[Completion]:
        """Continue ``prompts``, texts or lists of token ids, in one batch. ``options`` are those of :class:`Writing`.

        The texts come in the order of the prompts, those of one prompt together.
        """
        return self.write([prompts] if isinstance(prompts, str) else prompts, Writing(**options))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        template: str | None = None,
        date: str | None = None,
        show: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Completion:
        """Answer ``messages``, each with a ``role`` and a ``content``, through the model's own chat template.

        The other arguments are those of :meth:`chat_tokens`; ``show`` gets the pieces of the answer as they come, and
        ``options`` are those of :class:`Writing` but for ``num``. The answer also ends where the template ends its
        turn, and, by ``length``, where the model's positions do. Raises as :meth:`chat_tokens`.
        """
        writing = Writing(**options)
        if writing.num > 1:
            raise InputError(f"num={writing.num}: a conversation has one answer", fix="ask again with another seed")
        prompt = self._prompts.of(messages, tools, template=template, date=date)
        check_tokens(self, prompt.tokens)
        room = self.positions - len(prompt.tokens) + 1  # the last token is never read
        writing = replace(writing, max_new_tokens=min(writing.max_new_tokens, room))
        if not writing.past_end:
            stops = (*writing.stops, *prompt.stops)
            writing = replace(writing, stop=stops, stop_tokens=(*writing.stop_tokens, *prompt.ends))
        (answer,) = self.write([prompt.tokens], writing, None if show is None else lambda _, piece: show(piece))
        return answer

    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        template: str | None = None,
        date: str | None = None,
    ) -> list[int]:
        """Token ids of ``messages`` and of the beginning of an answer, as transformers' ``apply_chat_template``.

        ``tools`` are those that the model may call, as JSON schemas; ``template`` is Jinja, by default the model's own;
        ``date``, as 2026-11-30, is what it reads as today. Raises :class:`InputError` for messages that cannot be
        answered, :class:`DataError` without a tokenizer or a template.
        """
        return self._prompts.of(messages, tools, template=template, date=date).tokens

    @cached_property
    def _prompts(self) -> ChatPrompts:
        self.encode("")  # without a tokenizer there are none
        assert self.data is not None
        return ChatPrompts(self.data, self.source.path)

    def evaluate(
        self, *tasks: str, stride: int | None = None, batch: int = 8, progress: ReportProgress | None = None
    ) -> list[TaskResult]:
        """Evaluate the model on ``tasks``, each ``NAME=FILE``: perplexity, wikitext or lambada.

        ``stride`` tokens are scored in each window but the first, by default as the task defines it; ``batch`` windows
        are read at once; ``progress`` is told after each pass. Raises :class:`InputError` for an unknown task,
        :class:`DataError` for what it cannot read.
        """
        train, source, opens = self.run.config.train, self.source, None
        if self.data is not None and source.has_samples:
            length = source.sample_length if self.positions == source.longest else self.positions
            opens = partial(open_split, self.run.one("data"), self.data, sequence_length=length or self.positions)
        reader = TextReader(self.data, self.positions, train.seed, self.vocab_size, opens, self._compare_data)
        works = [make_work(task, reader, stride) for task in tasks]  # all mistakes come before the first takes its time
        return [run_task(*work, self.network, batch, progress) for work in works]

    def _compare_data(self) -> str:
        """A line if the files of the model's data do not hold what they held in its training; else nothing."""
        trained = self.source.data_files
        found = None if self.data is None or trained is None else contents_hash(self.data.files)
        if found is None or found.total == trained:
            return ""
        return f"the files of its data are not what they were at step {self.source.step}: its splits are others too"

    def step(self, batch: Tensor | Sequence[Prompt], *, lr: float = 1e-4) -> float:
        """Change the weights by one update of AdamW on ``batch``, texts or rows of token ids, all of one length.

        Returns the loss before it, in nats per token. Each token but a row's first is predicted, without dropout. The
        first call makes moments, which the next ones go on with. Raises :class:`InputError` for rows that cannot be
        read and for a model that several ranks share.
        """
        rows = batch.tolist() if isinstance(batch, torch.Tensor) else [self._tokens(each) for each in batch]
        if len({len(row) for row in rows}) != 1 or len(rows[0]) < 2:
            raise InputError("a batch is rows of equally many tokens, at least two", fix="cut them to one length")
        for row in rows:
            check_tokens(self, row[:-1])
            check_tokens(self, row[1:])
        if self._stepper is None:
            self._stepper = Stepper(self.network, self.run)
        return self._stepper.step(torch.tensor(rows, device=self.network.context.device), lr)

    def _tokens(self, prompt: Prompt) -> list[int]:
        return self.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """Yield the continuation of one prompt piece by piece, as it comes; ``options`` are those of :meth:`generate`.

        Raises :class:`DataError` without a tokenizer.
        """
        self.encode("")  # without a tokenizer there are no pieces
        for _, piece in self.start([prompt], Writing(**options)).pieces():
            if piece:
                yield piece

    def start(self, prompts: Sequence[Prompt], writing: Writing) -> Page:
        """Texts that continue ``prompts``, written as far as their pieces are asked for."""
        return Page(self, prompts, writing)

    def write(
        self, prompts: Sequence[Prompt], writing: Writing, show: Callable[[int, str], None] | None = None
    ) -> list[Completion]:
        """Continue ``prompts`` as ``writing`` says. ``show`` gets the number of a text and each piece of it."""
        page = self.start(prompts, writing)
        for number, piece in page.pieces():
            if show is not None and piece:
                show(number, piece)
        return page.completions()


class Page:
    """The texts that continue ``prompts``, ``writing.num`` each, while a model writes them."""

    def __init__(self, model: LoadedModel, prompts: Sequence[Prompt], writing: Writing) -> None:
        check_vocabulary(model, writing.stop_tokens)
        self._texts = [_Text(model, prompt, sample, writing) for prompt in prompts for sample in range(writing.num)]
        rows = [text.row for text in self._texts]
        self._generation = Generation(model.network, rows, writing.sampling, cache=writing.cache)

    def pieces(self) -> Iterator[tuple[int, str]]:
        """After each token, the number of its text and what of the text became certain, which may be nothing."""
        places = {id(text.row): number for number, text in enumerate(self._texts)}
        for row in self._generation.steps():
            number = places[id(row)]
            yield number, self._texts[number].push()

    def completions(self) -> list[Completion]:
        """The text that was written so far."""
        return [text.completion() for text in self._texts]


class _Text:
    """One text at work: its tokens, what of them is text, and when it ends."""

    def __init__(self, model: LoadedModel, prompt: Prompt, sample: int, writing: Writing) -> None:
        tokens = model.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
        end = None if model.data is None else model.data.end_of_text
        if not tokens and end is not None:
            tokens = [end]
        check_tokens(model, tokens)
        self.row = TextTokens(tokens, sample)
        self._writing, self._size = writing, len(tokens)
        self._prompt = prompt if isinstance(prompt, str) else model.decode(tokens)
        self._ends = frozenset(writing.stop_tokens) | (frozenset() if writing.past_end else model.ends)
        self._stream = None
        if self._prompt is not None:
            self._stream = TextStream(model.decode, tokens, writing.stops, model.silent_stops(writing.stops))
        self._stopped = False

    def push(self) -> str:
        """Take the token that was just generated; the text that became certain. May end the text."""
        token = self.row.tokens[-1]
        count = len(self.row.tokens) - self._size
        piece = ""
        if token in self._ends:
            self._stopped = True
        elif self._stream is not None:
            piece = self._stream.push(token)
            self._stopped = self._stream.stopped
        self.row.ended = self._stopped or count >= self._writing.max_new_tokens
        if self.row.ended and self._stream is not None:
            piece += self._stream.finish()
        return piece

    def completion(self) -> Completion:
        """The text that was written."""
        tokens = self.row.tokens
        return Completion(
            prompt=self._prompt,
            text=None if self._stream is None else self._stream.text,
            prompt_tokens=tuple(tokens[: self._size]),
            tokens=tuple(tokens[self._size :]),
            sample=self.row.sample,
            finish="stop" if self._stopped else "length",
        )


def check_tokens(model: LoadedModel, tokens: Sequence[int]) -> None:
    """Raise :class:`InputError` unless ``tokens`` are a prompt that ``model`` can read."""
    if not tokens:
        raise InputError("a prompt has no tokens", fix="give at least one")
    if len(tokens) > model.positions:
        why = f"{len(tokens)} tokens, and the model has {model.positions} positions"
        raise InputError("a prompt is too long", why=why, fix="shorten it")
    check_vocabulary(model, tokens)


def check_vocabulary(model: LoadedModel, tokens: Sequence[int]) -> None:
    """Raise :class:`InputError` unless all ``tokens`` are ids of ``model``."""
    if wrong := [token for token in tokens if not 0 <= token < model.vocab_size]:
        raise InputError(f"token {wrong[0]} is outside the model's vocabulary of {model.vocab_size}")
