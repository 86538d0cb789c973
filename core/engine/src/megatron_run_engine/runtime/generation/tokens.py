"""The loop that generates tokens: one forward-only pass of the pipeline a token, the same on every rank.

The texts of a batch end in one column of a table, short ones padded on the left. A *frame* is a first pass over all
columns, which fills the caches, and passes over one column each that follow. A new frame begins when a text has
outgrown the model's positions: it then goes on from the newer half of what the model could see. So it does when a text
has become so long that its positions are encoded in another way. The next token is
chosen greedily, or by a number that depends on seed, sample and position alone.

Legend: b rows, s columns of a pass, v vocabulary, p padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, lcm
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from megatron_run.contracts import Decoding, DecodingChunk, Microbatch
from megatron_run.errors import InputError
from megatron_run_engine.runtime.execute import StepInputs
from megatron_run_engine.runtime.rng import mix
from megatron_run_engine.runtime.sample_cut import gathered, held

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import Chunk, Model
    from megatron_run.pipeline.lower import Instruction
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_engine.runtime.execute import Executor
    from megatron_run_engine.runtime.sample_cut import SampleCut

#: Logits closer to the largest than this, relative to it, are ties, which the lowest token id wins: the same text comes
#: from any split of the model, though sums in another order differ in the last digits.
TIE = 1e-5


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: ``temperature`` 0 takes the likeliest, whatever the other values are.

    In this order, as in ``transformers``: the logits of tokens that the text holds are divided by
    ``repetition_penalty`` where positive and multiplied where negative (Keskar et al. 2019, CTRL); all are divided by
    the temperature; only the ``top_k`` largest stay (0: all); only the smallest set of likeliest tokens whose
    probabilities reach ``top_p`` stays (Holtzman et al. 2019). Raises :class:`InputError` for a value out of range.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, right, rule in (
            ("temperature", 0 <= self.temperature < inf, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < inf, "above 0"),
        ):
            if not right:
                raise InputError(f"{name}={getattr(self, name)}: it must be {rule}")


def choose_tokens(logits: Tensor, texts: Sequence[Sequence[int]], samples: Sequence[int], sampling: Sampling) -> Tensor:
    """The next token of each row, int64 [b], from ``logits`` fp32 [b, v].

    Row i continues the tokens ``texts[i]`` as sample ``samples[i]``. Its random number is a function of seed, sample
    and position, so that a text does not depend on its neighbours in the batch. The cumulative probabilities run over
    token ids, not over ranks: a difference in the last digit moves a boundary by as much and never swaps two tokens.
    """
    if sampling.repetition_penalty != 1:
        logits = _penalised(logits, texts, sampling.repetition_penalty)
    if sampling.temperature == 0:
        best = logits.amax(-1, keepdim=True)
        return (logits >= best - TIE * best.abs().clamp(min=1)).int().argmax(-1)  # the first of equal ones
    scores = logits.double() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[:, -1:], -inf)
    if sampling.top_p < 1:
        scores = _nucleus(scores, sampling.top_p)
    reached = scores.softmax(-1).cumsum(-1)  # [b, v]
    numbers = [mix(sampling.seed, sample, len(text)) / 2**63 for text, sample in zip(texts, samples, strict=True)]
    drawn = torch.tensor(numbers, dtype=reached.dtype, device=reached.device)[:, None] * reached[:, -1:]
    return torch.searchsorted(reached, drawn, right=True)[:, 0].clamp(max=scores.shape[-1] - 1)


def _penalised(logits: Tensor, texts: Sequence[Sequence[int]], penalty: float) -> Tensor:
    held = torch.zeros_like(logits, dtype=torch.bool)
    for row, text in enumerate(texts):
        held[row, torch.tensor(sorted(set(text)), device=logits.device)] = True
    return torch.where(held, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """``scores`` [b, v] without the tokens before which likelier ones reach ``top_p``; the likeliest always stays."""
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    dropped = before >= top_p
    dropped[:, 0] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter(-1, ids, dropped), -inf)


@dataclass(frozen=True)
class Network:
    """A model on the ranks that share it, as far as a forward needs it.

    ``forwards`` makes the program that runs so many microbatches forwards on this rank's stage, ``reads`` are the
    fields of samples that the stage needs, ``cut`` is what this rank takes of them, and ``last`` is the stage that has
    the head.
    """

    context: BuildContext
    model: Model
    chunks: Sequence[Chunk]
    executor: Executor
    forwards: Callable[[int], Sequence[Instruction]]
    reads: Sequence[str]
    cut: SampleCut
    last: int

    @property
    def positions(self) -> int:
        """The most tokens that a pass can read."""
        return self.context.train.sequence_length

    @property
    def caches(self) -> bool:
        """Whether the layers keep what they need of earlier tokens.

        Where ranks split the columns of a pass, a pass over one column has none to split.
        """
        return self._ways == 1 and all(isinstance(chunk, DecodingChunk) and chunk.caches for chunk in self.chunks)

    @property
    def _ways(self) -> int:
        """Columns of a pass come in multiples of it: ranks hold two pieces of one size, and equal shards of them."""
        pieces, shards = self.context.pieces.ranks, self.context.sequence_shards
        return pieces * lcm(2, shards) if pieces > 1 else shards

    def check_angles(self) -> None:
        """Raise :class:`InputError` where filling up the columns of a pass may turn a text as longer ones are."""
        if self.angle_switch is not None and self.angle_switch % self._ways:
            raise InputError(
                f"texts of up to {self.angle_switch} tokens have other angles than longer ones, and ranks split their "
                f"tokens in multiples of {self._ways}",
                fix="leave eval.tasks and eval.sample out, or set parallel.context=1 and parallel.sequence=false",
            )

    @property
    def angle_switch(self) -> int | None:
        """The longest text that is read with other angles than longer ones; None where all have the same."""
        switches = (chunk.angle_switch for chunk in self.chunks if isinstance(chunk, DecodingChunk))
        return next(filter(None, switches), None)

    def logits(self, tokens: Tensor, decoding: Decoding | None = None) -> Tensor | None:
        """Logits of ``tokens`` [b, s], int64: fp32 [s, b, v] on every rank of the last stage, None on the others.

        With ``decoding`` they may be those of the last column alone, [1, b, v].
        """
        rows, columns = tokens.shape
        if self._ways > 1:  # attention is causal: what fills up the columns changes nothing before them
            tokens = held(F.pad(tokens, (0, -columns % self._ways)), self.context.pieces, 1)
            decoding = None if decoding is None else replace(decoding, last_only=False)
        microbatch = Microbatch(0, 0, 0, {"tokens": tokens}, train=False, decoding=decoding)
        boundary = partial(self.model.boundary, micro_batch_size=rows, sequence_length=tokens.shape[1])
        record = self.executor.run(self.forwards(1), StepInputs(lambda _: microbatch, boundary))
        if not record.logits:
            return None
        context, here = self.context, record.logits[0]  # [s/C, b, p/t]
        if context.topology.sizes.tensor > 1:
            peers = context.groups.parallel_group(context.topology, "tensor")
            here = peers.gather(here.movedim(-1, 0)).movedim(0, -1)  # parts are joined along the first dimension
        return self.whole(here)[:columns, ..., : context.vocab_size].float()

    def whole(self, x: Tensor) -> Tensor:
        """``x`` [s/C, ...] of all context-parallel ranks, in the order of their samples: [s, ...]. Collective."""
        context = self.context
        return gathered(x, context.pieces, context.groups.parallel_group(context.topology, "context"))

    def share(self, values: Tensor) -> Tensor:
        """``values`` of the last stage's first tensor-parallel rank and replica, on every rank; changed in place.

        Copies of the model compute the same up to rounding, and must not take different tokens.
        """
        groups, topology = self.context.groups, self.context.topology
        for axis, index in (("tensor", 0), ("replicas", 0), ("pipeline", self.last)):
            peers = topology.peers(axis)  # type: ignore[arg-type]  # mypy widens the literals of a tuple
            if len(peers) > 1 and (axis == "pipeline" or topology.stage == self.last):
                groups.broadcast_(values, peers[index], axis)  # type: ignore[arg-type]
        return values


@dataclass
class TextTokens:
    """The tokens of one text, prompt first. ``sample`` numbers the texts that continue one prompt."""

    tokens: list[int]
    sample: int = 0
    ended: bool = False
    #: Where what the model sees begins.
    start: int = field(default=0, init=False)

    def window(self, longest: int) -> list[int]:
        """The tokens seen by the model, at most ``longest``: when there are more, the older half is left behind."""
        while len(self.tokens) - self.start > longest:
            self.start += (longest + 1) // 2
        return self.tokens[self.start :]


class Generation:
    """Continues ``texts``, none of which is empty. Collective: every rank that shares the network does the same.

    ``cache=False``, or a network without caches, reads every text anew for each of its tokens, one by one.
    """

    def __init__(
        self, network: Network, texts: Sequence[TextTokens], sampling: Sampling, *, cache: bool = True
    ) -> None:
        self._network, self._texts, self._sampling = network, texts, sampling
        self._cached = cache and network.caches
        self._frame: _Frame | None = None

    def steps(self) -> Iterator[TextTokens]:
        """Add a token to each text that has not ended, and yield these texts one by one, until all have ended.

        Whoever iterates sets ``ended``.
        """
        while live := [text for text in self._texts if not text.ended]:
            for text, token in zip(live, self._next_tokens(live), strict=True):
                text.tokens.append(token)
                yield text

    @torch.no_grad()
    def _next_tokens(self, live: Sequence[TextTokens]) -> list[int]:
        logits = self._together(live) if self._cached else self._one_by_one(live)
        if logits is None:
            chosen = torch.zeros(len(live), dtype=torch.int64, device=self._network.context.device)
        else:  # [b, v]
            texts, samples = [text.tokens for text in live], [text.sample for text in live]
            chosen = choose_tokens(logits, texts, samples, self._sampling)
        tokens: list[int] = self._network.share(chosen).tolist()
        return tokens

    def _together(self, live: Sequence[TextTokens]) -> Tensor | None:
        """Logits of each text's last token, [b, v], by one pass over what is new."""
        network, starts = self._network, [text.start for text in live]
        windows = [text.window(network.positions) for text in live]
        # A text that has just become long turns all its keys anew: the caches hold those of a short one.
        switched = any(len(window) - 1 == network.angle_switch for window in windows)
        if self._frame is None or switched or starts != [text.start for text in live]:
            self._frame = _Frame(live, windows, network.positions, network.context.device)
        rows = self._frame.keep(live)
        logits = network.logits(*self._frame.next_pass())
        if logits is None:
            return None
        return logits[-1] if rows is None else logits[-1, rows]

    def _one_by_one(self, live: Sequence[TextTokens]) -> Tensor | None:
        """Logits of each text's last token, [b, v], by a pass over each text."""
        network, found = self._network, []
        for text in live:
            tokens = torch.tensor([text.window(network.positions)], device=network.context.device)
            logits = network.logits(tokens, Decoding(last_only=True))
            found += [] if logits is None else [logits[-1]]
        return torch.cat(found) if found else None


class _Frame:
    """A table of texts whose columns the caches hold; the first pass reads ``windows``."""

    def __init__(
        self, texts: Sequence[TextTokens], windows: Sequence[list[int]], positions: int, device: torch.device
    ) -> None:
        self._texts, self._positions, self._device = list(texts), positions, device
        width = max(map(len, windows))
        missing = [width - len(window) for window in windows]
        self._tokens = [[0] * count + window for count, window in zip(missing, windows, strict=True)]
        padding = torch.tensor(missing, device=device) if any(missing) else None
        self._next = Decoding(padding=padding, caches={}, last_only=True)

    def keep(self, live: Sequence[TextTokens]) -> list[int] | None:
        """The rows of ``live``, None where they are all rows. Rows that have ended are forgotten once they are half."""
        if len(live) == len(self._texts):
            return None
        places = {id(text): row for row, text in enumerate(self._texts)}
        rows = [places[id(text)] for text in live]
        if 2 * len(rows) > len(places):
            return rows
        kept = torch.tensor(rows, device=self._device)
        self._texts = list(live)
        assert self._next.caches is not None
        for cache in self._next.caches.values():
            cache.keep(kept)
        if self._next.padding is not None:
            self._next = replace(self._next, padding=self._next.padding[kept])
        return None

    def next_pass(self) -> tuple[Tensor, Decoding]:
        """The tokens [b, s] of the next pass and what layers must know of it."""
        now = self._next
        if now.first:
            self._tokens = [text.tokens[-1:] for text in self._texts]
        tokens = torch.tensor(self._tokens, device=self._device)
        stop = now.first + tokens.shape[1]
        if now.padding is not None:
            columns, keys = (torch.arange(first, stop, device=self._device) for first in (now.first, 0))
            places = columns - now.padding[:, None]  # [b, s]; a row that has ended may lie behind the last position
            mask = (keys <= columns[:, None]) & (keys >= now.padding[:, None, None, None])  # [b, 1, s, c]
            now = replace(now, positions=places.clamp(0, self._positions - 1), mask=mask)
        self._next = replace(self._next, first=stop)
        return tokens, now
