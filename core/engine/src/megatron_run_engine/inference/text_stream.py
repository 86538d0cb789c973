"""From tokens to text: pieces that are whole characters, and texts that end at a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

#: A token sequence may end inside a character, which decodes as this until the rest has come.
INCOMPLETE = "\ufffd"
#: After so many tokens what does not decode is no part of a character: UTF-8 has at most 4 bytes.
_MOST_PENDING = 4

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

    A piece is given out once it is certain: its last character is whole, and no stop string can begin in it.
    """

    decode: Decode
    context: Sequence[int]
    stops: Sequence[str] = ()
    text: str = ""
    stopped: bool = False
    _tokens: list[int] = field(init=False)
    _from: int = field(init=False, default=0)
    _read: int = field(init=False)
    _shown: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        # Some tokenizers write a word's space only where another word comes before: decode with what came before.
        self._tokens = list(self.context[-_MOST_PENDING:])
        self._read = len(self._tokens)

    def push(self, token: int) -> str:
        """Add a token; the piece of text that is certain now. Sets ``stopped`` at a stop string, which is left out."""
        self._tokens.append(token)
        piece = self._new()
        if piece.endswith(INCOMPLETE) and len(self._tokens) - self._read < _MOST_PENDING:
            return ""
        self._from, self._read = self._read, len(self._tokens)
        return self._add(piece)

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        shown = "" if self.stopped else self._add(self._new())
        self._from = self._read = len(self._tokens)
        shown += self.text[self._shown :]
        self._shown = len(self.text)
        return shown

    def _new(self) -> str:
        """The text of the tokens that were not read yet."""
        before, after = (self.decode(self._tokens[self._from : stop]) or "" for stop in (self._read, None))
        return after[len(before) :]

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
