"""The fates of a flag of Megatron-LM, and how its values are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

Read = Callable[[Sequence[str]], object]
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")


class Verdict(Enum):
    """The fate of a flag; the value is the heading under which it is reported."""

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


def wholes(values: Sequence[str]) -> list[int]:
    """Any number of integers. Raises ValueError."""
    return [int(value) for value in values]


def pair(words: Sequence[str]) -> list[int]:
    """Two integers, whatever stands between: ``128,0`` or ``(128, 0)``. Raises ValueError."""
    found = [int(number) for number in re.findall(r"-?[0-9]+", " ".join(words))]
    if len(found) != 2:
        raise ValueError("it takes two numbers, as 128,0")
    return found


def shares(words: Sequence[str]) -> list[float]:
    """Shares of train, validation and test: the first three numbers, whatever stands between. Raises ValueError."""
    found = [float(share) for share in _NUMBER.findall(" ".join(words))]
    if not found or not found[0]:
        raise ValueError("it takes shares of train, validation and test, as 969,30,1")
    return [*found, 0.0, 0.0][:3]


@dataclass(frozen=True)
class Flag:
    """One flag, or with a ``*`` in its name a family of them.

    ``text`` names the keys that it decides, or is what to tell the user. ``read`` parses its value, which Megatron
    keeps under ``dest``. ``plain``: the value enters the key unchanged. ``same`` is the value that changes nothing.
    ``network``: the flag changes the network, so weights trained with it cannot be imported either.
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
        """Whether ``value``, parsed or out of a checkpoint, is other than the one that changes nothing."""
        if value in (None, False, [], ""):
            return False
        text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        try:
            return not self.same or float(text) != float(self.same)
        except ValueError:
            return text != self.same


def key_flag(name: str, key: str, read: Read) -> Flag:
    """A flag whose value enters ``key`` unchanged."""
    return Flag(name, Verdict.TAKEN, key, read, plain=True)


def keys_flag(name: str, keys: str, read: Read, dest: str = "") -> Flag:
    """A flag that decides ``keys``, alone or with others."""
    return Flag(name, Verdict.TAKEN, keys, read, dest)


def same_flag(name: str, why: str) -> Flag:
    """A flag that asks for what is so here anyway."""
    return Flag(name, Verdict.SAME, why)


def absent_flag(name: str, why: str, same: str = "") -> Flag:
    """A flag without a counterpart that changes nothing of what is learned."""
    return Flag(name, Verdict.ABSENT, why, same=same)


def differs_flag(name: str, why: str, same: str = "") -> Flag:
    """A flag without a counterpart that changes what is learned."""
    return Flag(name, Verdict.DIFFERS, why, same=same)


def network_flag(name: str, why: str, same: str = "") -> Flag:
    """A flag of a network that has no counterpart here."""
    return Flag(name, Verdict.DIFFERS, why, same=same, network=True)
