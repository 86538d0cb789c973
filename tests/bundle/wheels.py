"""Wheels, rewritten and left out: one GPU architecture's code in Transformer Engine's, none that the target has."""

from __future__ import annotations

import base64
import csv
import io
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email import message_from_bytes
from hashlib import sha256
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from tests.bundle.fatbin import keep_architecture


def narrow_wheel(wheel: Path, member: str, architecture: int) -> None:
    """Leave one architecture's code in the library ``member`` of ``wheel``, and write its new hash into ``RECORD``.

    Everything else, licences too, stays as it is. Raises :class:`FatbinError` for a library that cannot be read.
    """
    narrowed = wheel.with_suffix(".narrowed")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(narrowed, "w", zipfile.ZIP_DEFLATED) as new:
        library = keep_architecture(old.read(member), architecture)
        for each in old.infolist():
            if each.filename == member:
                data = library
            elif _of_this(each.filename, "RECORD"):
                data = _recorded(old.read(each), member, library)
            else:
                data = old.read(each)
            new.writestr(each, data, zipfile.ZIP_DEFLATED)
    narrowed.replace(wheel)


def _of_this(member: str, name: str) -> bool:
    """Whether ``member`` is the wheel's own metadata ``name``, and not that of a package which it carries inside."""
    return member.endswith(f".dist-info/{name}") and member.count("/") == 1


def _recorded(record: bytes, member: str, data: bytes) -> bytes:
    """``RECORD`` with the hash and size of ``member`` as ``data`` has them."""
    rows = list(csv.reader(io.StringIO(record.decode())))
    digest = base64.urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()
    (row,) = (row for row in rows if row[0] == member)
    row[1:] = [f"sha256={digest}", str(len(data))]
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(rows)
    return written.getvalue().encode()


def read_had(text: str) -> dict[str, str]:
    """Package -> its version, from the output of ``pip list --format=freeze`` or ``pip freeze``.

    A line may be a bare name, whose version is empty. Options and comments are passed over.
    """
    had: dict[str, str] = {}
    for line in (each.partition("#")[0].strip() for each in text.splitlines()):
        if line and not line.startswith("-"):
            requirement = Requirement(line)
            pins = [each.version for each in requirement.specifier if each.operator in ("==", "===")]
            had[canonicalize_name(requirement.name)] = pins[0] if pins else ""
    return had


@dataclass(frozen=True)
class Wheel:
    """A wheel's file, its package and what that requires, extras aside."""

    file: Path
    name: str
    requires: tuple[Requirement, ...]

    @classmethod
    def read(cls, file: Path) -> Wheel:
        """Of the metadata in ``file``."""
        with zipfile.ZipFile(file) as archive:
            (place,) = (each for each in archive.namelist() if _of_this(each, "METADATA"))
            found = message_from_bytes(archive.read(place)).get_all("Requires-Dist", [])
        requires = (Requirement(str(each)) for each in found)
        return cls(
            file, parse_wheel_filename(file.name)[0], tuple(one for one in requires if "extra" not in f"{one.marker}")
        )


def leave_out(folder: Path, had: Mapping[str, str], wanted: Iterable[str], needed: Iterable[str]) -> dict[str, str]:
    """Remove the wheels of ``folder`` that the target has; returns these packages with their versions.

    A wheel stays if its version there would not do for ``wanted``, or for another wheel that stays, and if it is one
    of ``needed``.
    """
    wheels = {each.name: each for each in map(Wheel.read, sorted(folder.glob("*.whl")))}
    asked = [Requirement(each) for each in wanted]
    kept = {name for name in wheels if name not in had or name in {*needed}}
    while True:
        needs = [*asked, *(each for name in kept for each in wheels[name].requires)]
        unfit = {canonicalize_name(each.name) for each in needs if not _satisfied(each, had)} & wheels.keys()
        if unfit <= kept:
            break
        kept |= unfit
    left = {name: had[name] for name in wheels if name not in kept}
    for name in left:
        wheels[name].file.unlink()
    return left


def _satisfied(requirement: Requirement, had: Mapping[str, str]) -> bool:
    """Whether the target's version will do; one that is not named will."""
    version = had.get(canonicalize_name(requirement.name), "")
    return not version or requirement.specifier.contains(version, prereleases=True)
