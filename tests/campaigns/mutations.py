"""Changes of a valid file, drawn at random: of its bytes, of the tree in its JSON, of a line of many."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

T = TypeVar("T")
#: What a file's content is: any bytes, JSON, or JSON by the line.
Kind = Literal["bytes", "json", "lines"]

#: Bytes that mean something to one of the formats: JSON, YAML, shells, Jinja, CSV, pickles.
_TELLING = [b"{", b"}", b"[", b"]", b'"', b":", b",", b"\n", b"- ", b"&a", b"*a", b"!!", b"0", b"-1", b"1e999", b"\xff"]
_TELLING += [b"null", b"NaN", b"9" * 30, b"9" * 5000, b"\\u0000", b"\\ud800", b"\0", b"..", b"/", b"\t", b"#", b"|"]
_TELLING += [b">", b"%", b"@", b"$(", b"${", b"$((9**9**9))", b"`", b"'", b"\\\n", b"{{", b"{%", b"\x1b[2J", b"\r"]
_TELLING += [b"\xef\xbb\xbf", b"cos\nsystem\n", b"\x80\x04", b"R", b"b", b"\x8e", b"\x96", b"r\xff\xff\xff\x7f", b"."]
_TELLING += [b"[" * 100_000, b'{"a":' * 20_000, b"- " * 20_000, b"(" * 5_000]
#: Numbers at the edges of their types, and how they lie in a file.
_NUMBERS = (0, 1, -1, 127, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_WIDTHS = (1, 2, 4, 8)
#: Values in the place of others. A marked one becomes longer or deeper than a tree of Python's could be.
_DEEP, _LONG, _DIGITS, _MAPS = "@deep@", "@long@", "@digits@", "@maps@"
_MARKED = {
    _DEEP: "[" * 100_000 + "]" * 100_000,
    _LONG: '"' + "x" * 200_000 + '"',
    _DIGITS: "7" * 5000,
    _MAPS: '{"a":' * 5000 + "1" + "}" * 5000,
}
_VALUES: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 1.5, -0.0, 1e-300, 1e300, float("inf"), float("nan"), 10**18, -(10**18)),
    *(2**31, 2**63, 2**64, 10**30, "", "a", "0", "-1", "..", "../x", "/etc/passwd", "\0", "\n", "\x1b[2J", "\ud800"),
    *("int", "F32", "1e999", "nan", [], [[]], [0], [None], {}, {"": 0}, [1, 2], ["a", "b"], {"a": {"b": []}}),
    *_MARKED,
)
#: How many changes are made at once; how many bytes one of them takes.
_TIMES, _BYTES = (1, 1, 2, 4, 12), (0, 1, 1, 4, 8, 64)


class _Dice(random.Random):
    """Choices that a seed repeats."""

    def below(self, count: int) -> int:
        return self.randrange(count)

    def among(self, values: Sequence[T]) -> T:
        return values[self.randrange(len(values))]


def changed(seed: int, samples: Sequence[bytes], kind: Kind) -> bytes:
    """One of ``samples``, changed as its ``kind`` allows, or as bytes whatever it is. A ``seed`` repeats it."""
    dice = _Dice(seed)
    content = dice.among(samples)
    if kind == "bytes" or not dice.below(2):
        return _changed_bytes(dice, content)
    if kind == "json":
        return _changed_json(dice, content)
    lines = content.split(b"\n")
    number = dice.below(len(lines))
    lines[number] = _changed_json(dice, lines[number])
    return b"\n".join(lines)


def _changed_bytes(dice: _Dice, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(dice.among(_TIMES)):
        at = dice.below(len(data) + 1)
        end = min(len(data), at + dice.among(_BYTES))
        match dice.below(7):
            case 0:
                del data[at:end]
            case 1:
                data[at:end] = dice.among(_TELLING)
            case 2:
                data[at:end] = dice.randbytes(end - at)
            case 3:
                data[at:at] = data[at:end]
            case 4:
                width, number = dice.among(_WIDTHS), dice.among(_NUMBERS)
                data[at : at + width] = struct.pack("<Q", number % 2**64)[:width]
            case 5:
                data[at:end] = bytes(each ^ (1 << dice.below(8)) for each in data[at:end][:2]) + data[at:end][2:]
            case 6:
                del data[at:]
    return bytes(data)


def _changed_json(dice: _Dice, content: bytes) -> bytes:
    """``content`` with other values, names and nesting; changed as bytes where it is no JSON, or too deep."""
    try:
        tree = [json.loads(content)]
        for _ in range(dice.among(_TIMES)):
            _change_tree(dice, tree)
        text = json.dumps(tree[0])
    except (ValueError, RecursionError):
        return _changed_bytes(dice, content)
    for mark, meant in _MARKED.items():
        text = text.replace(f'"{mark}"', meant)
    return text.encode()


def _change_tree(dice: _Dice, tree: list[Any]) -> None:
    places = list(_places(tree))
    holder, name = dice.among(places)
    match dice.below(6):
        case 0 | 1:
            holder[name] = copy.deepcopy(dice.among(_VALUES))
        case 2:
            other, key = dice.among(places)
            holder[name] = copy.deepcopy(other[key])
        case 3 if holder is not tree:
            del holder[name]
        case 4 if isinstance(holder, dict):
            holder[str(dice.among(_VALUES))] = holder.pop(name)
        case 5:
            holder[name] = [holder[name]] * dice.below(4)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in ``tree`` that holds a value: what it is in, and its name or number there."""
    for name in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, name
        if isinstance(tree[name], dict | list):
            yield from _places(tree[name])


def shrunk(content: bytes, fails: Callable[[bytes], bool], most: int = 200) -> bytes:
    """A shorter input that ``fails`` too: pieces are left out, ever smaller ones; at most so many are tried."""
    size, tries = len(content) // 2, 0
    while size and tries < most:
        at = 0
        while at < len(content) and tries < most:
            shorter, tries = content[:at] + content[at + size :], tries + 1
            content, at = (shorter, at) if fails(shorter) else (content, at + size)
        size //= 2
    return content
