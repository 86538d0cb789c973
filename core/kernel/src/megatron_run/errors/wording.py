"""The wording of messages: similar words and paths, near numbers, plurals, escapes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from math import isqrt
from pathlib import Path
from shlex import quote


def printable(text: str) -> str:
    """``text`` with what a terminal would obey, or cannot show, escaped as Python does.

    Names in a file of somebody else's end up in messages. A line's end stays where an indented line follows it: those
    are tables of ours.
    """
    if text.isprintable():
        return text
    following = (*text[1:], "")
    kept = (each.isprintable() or (each, after) == ("\n", " ") for each, after in zip(text, following, strict=True))
    return "".join(each if keep else ascii(each)[1:-1] for each, keep in zip(text, kept, strict=True))


#: Characters of a word that is compared with others: the time grows with the product of two lengths.
LONGEST_WORD = 200


def similar_word(name: str, known: Iterable[str]) -> str:
    """The known word that is most similar to ``name``; empty if none is."""
    if len(name) > LONGEST_WORD:
        return ""
    near = get_close_matches(name, [each for each in known if len(each) <= LONGEST_WORD], n=1, cutoff=0.6)
    return near[0] if near else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"did you mean 'interleaved'?"``, or an empty string if no known word is similar."""
    near = similar_word(name, known)
    return f"did you mean {near!r}?" if near else ""


def near_path(path: Path) -> str:
    """:func:`did_you_mean` for the first missing part of ``path``, among what is beside it; endings do not count.

    A link whose target is gone is not there either.
    """
    try:
        missing = next(each for each in (*reversed(path.parents), path) if not each.exists())
        there = [each for each in sorted(missing.parent.iterdir()) if each.exists()]
        alike = [each.name for each in there if did_you_mean(missing.stem, [each.stem])]
        return did_you_mean(missing.name, alike)
    except (StopIteration, OSError):
        return ""


#: NAME or ORGANISATION/NAME, as models of the Hugging Face Hub are called; the part before a slash.
_HUB_NAME = re.compile(r"(?:([A-Za-z0-9][\w-]*)/)?[A-Za-z0-9][\w.-]*")
#: The most characters of one, and how it is typed.
_LONGEST_HUB_NAME, _HUB = 96, "hf:"


def from_hub(path: Path, *, saved_steps: bool = False) -> str:
    """The words to type for ``path``, which does not exist, if it may be a name on the Hub; else an empty string.

    ``saved_steps``: those are looked for, which the Hub has not. Some commands import a model by themselves.
    """
    near = path
    with suppress(OSError, ValueError):  # the current folder was removed; ``path`` lies elsewhere
        near = path.relative_to(Path.cwd())
    if saved_steps and str(near).startswith(_HUB):
        return f"import it first: megatron-run import {quote(str(near))} NEW, then name NEW"
    name = _HUB_NAME.fullmatch(str(near)) if len(str(near)) <= _LONGEST_HUB_NAME else None
    if name is None or near.suffix[1:].isalpha() or (name[1] and (name[1] == "runs" or Path(name[1]).exists())):
        return ""
    how = " to finetune, generate or eval it, or megatron-run import {} NEW" if saved_steps else ""
    return f"if {near} is a model of the Hugging Face Hub, type {_HUB}{near}{how.format(f'{_HUB}{near}')}"


def advice(*parts: str) -> str:
    """The non-empty parts as one line: ``"did you mean '1f1b'? installed: sequential, 1f1b"``."""
    return "; ".join(filter(None, parts)).replace("?; ", "? ")


def plural(number: int, noun: str) -> str:
    """``"1 stage"``, ``"2 stages"``, ``"2 microbatches"``."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def duration(seconds: float) -> str:
    """Return ``42 s``, ``3 min 05 s`` or ``2 h 14 min``."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def nearest(number: int, others: Iterable[int]) -> str:
    """The one of ``others`` next below ``number`` and the one next above: ``"4 or 8"``; empty without any."""
    ascending = sorted(others)
    below, above = ([each for each in ascending if each < number], [each for each in ascending if each > number])
    return " or ".join(map(str, below[-1:] + above[:1]))


def nearest_multiples(number: int, factor: int) -> str:
    """The multiples of ``factor`` below and above ``number``, which is not one: ``"96 or 104"``; never 0."""
    below = number // factor * factor
    return nearest(number, [below or factor, below + factor])


def nearest_divisors(number: int, wanted: int, factor: int = 1) -> str:
    """The divisors of ``number`` below and above ``wanted``, which is not one: ``"4 or 6"``.

    They are multiples of ``factor``, if it divides ``number``. Of a number beyond 10^12 they are the nearest that have,
    or leave, a factor of at most 10^6.
    """
    step = 1 if number % factor else factor
    rest = number // step
    small = [divisor for divisor in range(1, min(isqrt(rest), 10**6) + 1) if rest % divisor == 0]
    return nearest(wanted, [step * divisor for each in small for divisor in (each, rest // each)])
