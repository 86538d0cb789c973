"""What a flag of Megatron-LM is: how its value is read, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

Read = Callable[[Sequence[str]], object]


class Verdict(Enum):
    """What becomes of a flag; the value is the heading under which it is told."""

    TAKEN = "becomes a key"
    SAME = "is so here anyway"
    ABSENT = "has no counterpart, and changes nothing of what is learned"
    DIFFERS = "has no counterpart, and what is learned will differ"


def whole(words: Sequence[str]) -> int:
    """One integer. Raises ValueError."""
    return int(only(words))


def number(words: Sequence[str]) -> float:
    """One number. Raises ValueError."""
    return float(only(words))


def only(words: Sequence[str]) -> str:
    """One word. Raises ValueError."""
    if len(words) != 1:
        raise ValueError(f"it takes one value, not {len(words)}")
    return words[0]


def on(words: Sequence[str]) -> bool:
    """A switch. Raises ValueError for one with a value."""
    if words:
        raise ValueError("it takes no value")
    return True


def off(words: Sequence[str]) -> bool:
    """A switch that clears what is on without it. Raises ValueError for one with a value."""
    return not on(words)


def wholes(words: Sequence[str]) -> list[int]:
    """Any number of integers. Raises ValueError."""
    return [int(word) for word in words]


@dataclass(frozen=True)
class Flag:
    """One flag, or with a ``*`` in its name a family of them.

    ``text`` is the key, or the keys, that it decides, or what to say of it. ``read`` reads its value, which Megatron
    keeps under ``dest``. ``plain``: the value goes into the key as it is. ``same`` is a value with which nothing
    differs. ``network``: it changes the network, so that weights trained with it have no place here either.
    """

    name: str
    verdict: Verdict
    text: str
    read: Read = list
    dest: str = ""
    plain: bool = False
    same: str = ""
    network: bool = False

    @property
    def stored(self) -> str:
        """Megatron's name of the value."""
        return self.dest or self.name.removeprefix("--").replace("-", "_")

    def differs(self, value: object) -> bool:
        """Whether ``value``, as it was read or as a checkpoint holds it, is none with which nothing differs."""
        if value in (None, False, [], ""):
            return False
        text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        try:
            return not self.same or float(text) != float(self.same)
        except ValueError:
            return text != self.same
