"""From tokens to text: pieces that are whole characters, and texts that end at a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

#: A token sequence may end inside a character, which decodes as this until the rest has come.
INCOMPLETE = "\ufffd"
#: After so many tokens what does not decode is no part of a character, except for one less: UTF-8 has at most 4 bytes.
_MOST_PENDING = 4
#: So many tokens before a text are decoded with it at first.
_BEFORE = 4

Decode = Callable[[Sequence[int]], str | None]


@dataclass(frozen=True)
class Completion:
    """One text that a model has written.

    ``prompt`` and ``text``, what follows it, are None without a tokenizer. ``tokens`` are those that were generated;
    those of a stop string are among them, though it is not in ``text``. ``sample`` numbers the texts of one prompt.
    ``finish``: ``stop`` at a stop string or token, ``length`` at the most tokens that were asked for.
    """

    prompt: str | None
    text: str | None
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    sample: int
    finish: Literal["stop", "length"]

    def __str__(self) -> str:
        return self.ids if self.text is None else f"{self.prompt}{self.text}"

    @property
    def ids(self) -> str:
        """All tokens, those of the prompt first: ``1 2 3``."""
        return " ".join(map(str, (*self.prompt_tokens, *self.tokens)))


@dataclass
class TextStream:
    """Decodes the tokens that follow ``context`` as they come, and finds the first of the ``stops``.

    A piece is given out once it is certain: its last character is whole, and no stop string can begin in it. ``silent``
    are the tokens of stops that decoding does not show, such as ``<|im_end|>``: the text stops after them too.
    """

    decode: Decode
    context: Sequence[int]
    stops: Sequence[str] = ()
    silent: Sequence[tuple[int, ...]] = ()
    text: str = ""
    stopped: bool = False
    _tokens: list[int] = field(init=False)
    _written: int = field(init=False)
    _from: int = field(init=False, default=0)
    _next: int = field(init=False)
    _given: int = field(init=False)
    _pending: int = field(init=False, default=0)
    _shown: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        # Some tokenizers write a word's space only where another word comes before: decode with what came before.
        before = _BEFORE
        while not self._visible(self.context[-before:]) and before < len(self.context):
            before *= 2
        self._tokens = list(self.context[-before:])
        self._written = self._next = len(self._tokens)
        self._given = len(self.decode(self._tokens) or "")

    def push(self, token: int) -> str:
        """Add a token; the piece of text that is certain now. Sets ``stopped`` at a stop string, which is left out."""
        self._tokens.append(token)
        text = self.decode(self._tokens[self._from :]) or ""
        certain = len(text.rstrip(INCOMPLETE))
        self._pending = 0 if certain == len(text) else self._pending + 1
        if self._pending >= _MOST_PENDING:
            certain = max(certain, len(text) - _MOST_PENDING + 1)
        piece = self._new(text, certain)
        if not self._pending:
            self._leave_behind()
        shown = self._add(piece)
        if any(self._tokens[self._written :][-len(stop) :] == list(stop) for stop in self.silent):
            self.stopped = True
        return shown

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        text = self.decode(self._tokens[self._from :]) or ""
        shown = "" if self.stopped else self._add(self._new(text, len(text)))
        shown += self.text[self._shown :]
        self._shown = len(self.text)
        return shown

    def _new(self, text: str, end: int) -> str:
        """The part of ``text``, of the tokens from ``_from`` on, up to ``end`` that was not given out."""
        piece, self._given = text[self._given : end], max(self._given, end)
        return piece

    def _leave_behind(self) -> None:
        """Decode no token twice for long: from where the piece began that was the last to be whole, if it shows."""
        last = self._tokens[self._next :]
        if self._visible(last):
            self._from, self._given = self._next, len(self.decode(last) or "")
            self._next = len(self._tokens)

    def _visible(self, tokens: Sequence[int]) -> bool:
        return bool((self.decode(tokens) or "").strip())

    def _add(self, piece: str) -> str:
        longest = max(map(len, self.stops), default=0)
        look = max(0, len(self.text) - longest)
        self.text += piece
        places = [place for stop in self.stops if (place := self.text.find(stop, look)) >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True
            certain = len(self.text)
        else:
            certain = len(self.text) - self._held(longest)
        shown, self._shown = self.text[self._shown : certain], max(self._shown, certain)
        return shown

    def _held(self, longest: int) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        ends = range(min(longest - 1, len(self.text)), 0, -1)
        return next((size for size in ends if any(stop.startswith(self.text[-size:]) for stop in self.stops)), 0)
