"""Leaves one GPU architecture's code in a shared library that nvcc made: the other code becomes zeros, in place.

The section ``.nv_fatbin`` of such a library is a row of fatbins, at multiples of 8. NVIDIA describes none of it; the
layout is the one that ``cuobjdump`` reads, little-endian:

======  ====  =========================================================
fatbin  size  field
======  ====  =========================================================
0       4     magic, 0xBA55ED50
4       2     version, 1
6       2     bytes of this header, 16
8       8     bytes of all entries that follow
======  ====  =========================================================

======  ====  =========================================================
entry   size  field
======  ====  =========================================================
0       2     kind: 1 is PTX, which the driver compiles; 2 is machine code
2       2     attributes
4       4     bytes of this header
8       8     bytes of the payload after it, perhaps compressed
28      4     architecture: 90 is compute capability 9.0
======  ====  =========================================================

Nothing moves and no size changes, so that every offset in the library still holds; zeros compress to nothing. The
driver chooses an entry by its header, and never reads the others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SECTION = ".nv_fatbin"
MAGIC, VERSION = 0xBA55ED50, 1
PTX, MACHINE_CODE = 1, 2
_FATBIN, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ12xI")
#: Largest header of an entry that is believed; those seen have 64 to 120 bytes.
_LARGEST_HEADER = 1024


class FatbinError(ValueError):
    """A library that is torn, of an unknown layout, or without code for the architecture."""


@dataclass(frozen=True)
class Entry:
    """Code for one architecture: its payload is ``library[start:stop]``."""

    kind: int
    architecture: int
    start: int
    stop: int

    def runs_on(self, architecture: int) -> bool:
        """Machine code runs on its generation, from its own member on; PTX on all that are not older."""
        if self.kind == PTX:
            return self.architecture <= architecture
        return self.architecture // 10 == architecture // 10 and self.architecture <= architecture


def keep_architecture(library: bytes, architecture: int) -> bytes:
    """A copy of ``library``, of the same size, in which all code that ``architecture`` cannot use is zeros.

    PTX goes too where there is machine code. Raises :class:`FatbinError`, also where a fatbin has nothing to keep.
    """
    copy = bytearray(library)
    for entries in fatbins(library):
        usable = [each for each in entries if each.runs_on(architecture)]
        kept = [each for each in usable if each.kind == MACHINE_CODE] or usable
        if entries and not kept:
            found = sorted({each.architecture for each in entries})
            raise FatbinError(f"there is no code for {architecture}, only for {', '.join(map(str, found))}")
        for each in entries:
            if each not in kept:
                copy[each.start : each.stop] = bytes(each.stop - each.start)
    return bytes(copy)


def fatbins(library: bytes) -> Iterator[list[Entry]]:
    """The entries of each fatbin of the shared object ``library``. Raises :class:`FatbinError`."""
    position, end = _section(library, SECTION)
    while position < end:
        if library[position : position + 8] == bytes(min(8, end - position)):
            position += 8  # between two fatbins
            continue
        magic, version, header, size = _read(_FATBIN, library, position, end)
        if (magic, version, header) != (MAGIC, VERSION, _FATBIN.size) or size > end - position - header:
            raise FatbinError(f"there is no fatbin of version {VERSION} at byte {position}")
        yield list(_entries(library, position + header, position + header + size))
        position = -(-(position + header + size) // 8) * 8


def _entries(library: bytes, position: int, end: int) -> Iterator[Entry]:
    while position < end:
        kind, _, header, size, architecture = _read(_ENTRY, library, position, end)
        start = position + header
        if kind not in (PTX, MACHINE_CODE) or not _ENTRY.size <= header <= _LARGEST_HEADER or size > end - start:
            raise FatbinError(f"the entry at byte {position} is torn, or of an unknown kind ({kind})")
        yield Entry(kind, architecture, start, start + size)
        position = start + size


def _read(layout: struct.Struct, library: bytes, position: int, end: int) -> tuple[int, ...]:
    if position + layout.size > end:
        raise FatbinError(f"the header at byte {position} is torn")
    return layout.unpack_from(library, position)


def _section(library: bytes, name: str) -> tuple[int, int]:
    """First byte and end of a section of a 64-bit little-endian ELF file."""
    if library[:6] != b"\x7fELF\x02\x01" or len(library) < 64:
        raise FatbinError("it is no shared object of a 64-bit machine")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, named = struct.unpack_from("<HHH", library, 0x3A)
    header = struct.Struct("<I20xQQ")  # the name's place, the section's offset and size
    if size < header.size or named >= count or table + size * count > len(library):
        raise FatbinError("its table of sections is torn")
    rows = [header.unpack_from(library, table + size * row) for row in range(count)]
    names = rows[named][1]
    for place, offset, length in rows:
        if library.startswith(name.encode() + b"\0", names + place):
            if offset + length > len(library):
                raise FatbinError(f"its section {name} is torn")
            return offset, offset + length
    raise FatbinError(f"it has no section {name}: no code for GPUs")
