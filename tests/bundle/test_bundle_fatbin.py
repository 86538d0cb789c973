"""One architecture's code is left in a library: nothing else changes, and what is torn or unknown is refused."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest

from tests.bundle.fatbin import MACHINE_CODE, MAGIC, PTX, FatbinError, fatbins, keep_architecture

#: Kind, architecture, bytes of the header, payload.
Code = tuple[int, int, int, bytes]


def fatbin(*codes: Code) -> bytes:
    entries = b""
    for kind, architecture, header, payload in codes:
        fields = struct.pack("<HHIQIIHHI", kind, 0x101, header, len(payload), len(payload), 0, 7, 1, architecture)
        entries += fields + b"\x11" * (header - len(fields)) + payload
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(entries)) + entries


def library(section: bytes, name: bytes = b".nv_fatbin") -> bytes:
    """A shared object with code, ``section``, data, and the table of sections at its end."""
    head, code, data = bytearray(64), b"\x90" * 40, struct.pack("<I", MAGIC) + b"no fatbin at all"
    names = b"\0.text\0" + name + b"\0.data\0.shstrtab\0"
    blobs = [(b".text", code), (name, section), (b".data", data), (b".shstrtab", names)]
    body, rows = b"", [bytes(64)]
    for each, blob in blobs:
        rows.append(struct.pack("<IIQQQQIIQQ", names.index(each), 1, 0, 0, 64 + len(body), len(blob), 0, 0, 8, 0))
        body += blob
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 0x28, 64 + len(body))
    struct.pack_into("<HHH", head, 0x3A, 64, len(rows), len(rows) - 1)
    return bytes(head) + body + b"".join(rows)


def padded(*each: bytes) -> bytes:
    return b"".join(one + bytes(-len(one) % 8) for one in each)


def drawn(seed: int) -> tuple[bytes, list[list[Code]]]:
    """A library with fatbins of random sizes, each with code for 90 among others, in random order."""
    draw = random.Random(seed)
    made = []
    for _ in range(draw.randint(1, 6)):
        architectures = [90, *draw.sample((75, 80, 89, 100, 120), draw.randint(0, 5))]
        draw.shuffle(architectures)
        sizes = (draw.randint(1, 200) for _ in architectures)
        headers = (draw.choice((64, 112, 120)) for _ in architectures)
        made.append(
            [
                (MACHINE_CODE, architecture, header, bytes(draw.randint(1, 255) for _ in range(size)))
                for architecture, header, size in zip(architectures, headers, sizes, strict=True)
            ]
        )
    gaps = bytes(8 * draw.randint(0, 3))
    return library(padded(*(fatbin(*codes) for codes in made)) + gaps), made


@pytest.mark.parametrize("seed", range(50))
def test_only_other_architectures_code_becomes_zeros(seed: int) -> None:
    whole, made = drawn(seed)
    kept = keep_architecture(whole, 90)
    assert len(kept) == len(whole)
    found = [entry for entries in fatbins(whole) for entry in entries]
    codes = [code for each in made for code in each]
    assert [(each.kind, each.architecture, whole[each.start : each.stop]) for each in found] == [
        (kind, architecture, payload) for kind, architecture, _, payload in codes
    ]
    expected = bytearray(whole)
    for each in found:
        if each.architecture != 90:
            expected[each.start : each.stop] = bytes(each.stop - each.start)
    assert kept == expected
    assert keep_architecture(kept, 90) == kept


@pytest.mark.parametrize(
    ("there", "architecture", "kept"),
    [
        ([(MACHINE_CODE, 80), (MACHINE_CODE, 89), (MACHINE_CODE, 90)], 89, [True, True, False]),
        ([(MACHINE_CODE, 80), (MACHINE_CODE, 89), (MACHINE_CODE, 90)], 86, [True, False, False]),
        ([(MACHINE_CODE, 100), (MACHINE_CODE, 103), (MACHINE_CODE, 120)], 103, [True, True, False]),
        ([(PTX, 80), (MACHINE_CODE, 90)], 90, [False, True]),
        ([(MACHINE_CODE, 80), (PTX, 80), (PTX, 100)], 90, [False, True, False]),
    ],
)
def test_what_the_driver_could_use_is_kept(
    there: Sequence[tuple[int, int]], architecture: int, kept: Sequence[bool]
) -> None:
    whole = library(fatbin(*((kind, each, 64, b"code") for kind, each in there)))
    left = keep_architecture(whole, architecture)
    (entries,) = fatbins(whole)
    assert [left[each.start : each.stop] == b"code" for each in entries] == list(kept)


GOOD = fatbin((MACHINE_CODE, 90, 64, b"code" * 8))
REFUSED = {
    "there is no code for 70, only for 90": (library(GOOD), 70),
    "no shared object": (b"\x7fELF\x01" + bytes(200), 90),
    "table of sections is torn": (library(GOOD)[:-1], 90),
    "no section .nv_fatbin": (library(GOOD, b".rodata"), 90),
    "there is no fatbin of version 1 at byte 104": (library(GOOD[:4] + b"\2\0" + GOOD[6:]), 90),
    "there is no fatbin of version 1 at byte 216": (library(GOOD + b"something else" + bytes(26)), 90),
    "header at byte 216 is torn": (library(padded(GOOD) + GOOD[:12]), 90),
    "there is no fatbin of version 1 at byte": (library(GOOD[:-8]), 90),
    "unknown kind \\(3\\)": (library(fatbin((3, 90, 64, b"code"))), 90),
    "entry at byte 120 is torn": (library(GOOD[:24] + struct.pack("<Q", 33) + GOOD[32:]), 90),
    "entry at byte 120 is torn, or": (library(GOOD[:20] + struct.pack("<I", 8) + GOOD[24:]), 90),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_torn_or_unknown_is_refused(message: str) -> None:
    whole, architecture = REFUSED[message]
    with pytest.raises(FatbinError, match=message):
        keep_architecture(whole, architecture)
