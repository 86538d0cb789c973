"""Finds installed plugins in one scan of the entry points; imports none of them.

The digest of a plugin's source code, by which ranks detect that they run different code, is taken here too.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from types import ModuleType

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from megatron_run.contracts.plugin import COMMAND, KINDS, entry_point_group
from megatron_run.errors.install_hint import ENGINE
from megatron_run.errors.wording import did_you_mean

#: The distribution whose version plugins ask for.
KERNEL = "megatron-run-core"
#: The distributions whose plugins are the built-ins.
BUILT_IN = (KERNEL, ENGINE)

_PREFIX = "megatron_run."
_KIND_OF_GROUP = {entry_point_group(kind): kind for kind in (*KINDS, COMMAND)}
_WORD = "[a-z0-9]+(-[a-z0-9]+)*"
#: The name of a command's entry point: the words after ``megatron-run``, joined by full stops.
_COMMAND_NAME = re.compile(rf"{_WORD}(\.{_WORD})*")


@dataclass(frozen=True)
class Entry:
    """One plugin, or one command, as metadata describes it, before any import.

    ``value`` is the entry point's object reference (``package`` or ``package:attribute``), or the path of a
    single-file plugin. ``requires_kernel`` is the version specifier of its requirement on the kernel, empty when it
    has none. ``location`` is the folder of the metadata, or the file. ``distribution`` is the name as PyPI normalises
    it, empty for a single file.
    """

    kind: str
    name: str
    value: str
    distribution: str = ""
    version: str = ""
    requires_kernel: str = ""
    location: str = ""

    @property
    def builtin(self) -> bool:
        """Whether the plugin comes with the kernel or the engine."""
        return self.distribution in BUILT_IN

    @property
    def file(self) -> Path | None:
        """The path of a single-file plugin, None for an installed one."""
        return None if self.distribution else Path(self.value)

    @property
    def source(self) -> str:
        """Where it comes from, for messages: ``acme-zigzag 0.3.0``, or the path of a single file."""
        return f"{self.distribution} {self.version}" if self.distribution else self.value

    def __str__(self) -> str:
        return f"{self.kind}={self.name}" if self.kind else self.name  # the kind of a file may be found later


def plain_name(reference: str) -> str:
    """A plugin's name without the distribution of a built-in: ``megatron-run-engine:gpt`` -> ``gpt``."""
    owner, colon, name = reference.partition(":")
    return name if colon and owner in BUILT_IN else reference


@dataclass(frozen=True)
class Catalog:
    """Every plugin and command found, in the order of the search path, and ``notices`` about what was odd."""

    entries: tuple[Entry, ...]
    notices: tuple[str, ...] = ()
    commands: tuple[Entry, ...] = ()

    def of_kind(self, kind: str) -> tuple[Entry, ...]:
        """The entries of ``kind``, which may be ``command``: built-ins first, then by name."""
        entries = (entry for entry in (*self.entries, *self.commands) if entry.kind == kind)
        return tuple(sorted(entries, key=lambda entry: (not entry.builtin, entry.name, entry.distribution)))

    def offering(self, kind: str, name: str) -> tuple[Entry, ...]:
        """Every entry of that kind and name: more than one is an ambiguity."""
        return tuple(entry for entry in self.of_kind(kind) if entry.name == name)


@dataclass(frozen=True)
class _Offer:
    """The metadata of a distribution, read once: each of its properties would parse the whole text anew.

    ``name`` is the distribution's own spelling of it, ``folder`` where its metadata is.
    """

    name: str
    version: str
    requires: tuple[str, ...]
    points: tuple[EntryPoint, ...]
    folder: str

    @property
    def plain_name(self) -> str:
        """The name as PyPI normalises it."""
        return canonicalize_name(self.name)


def scan(paths: Sequence[str] | None = None, kind: str = "") -> Catalog:
    """Read the entry points of every distribution on ``paths`` (default: ``sys.path``).

    With a ``kind`` only distributions that offer it are looked at, with all that they offer: a third of the time.
    """
    group = entry_point_group(kind) if kind else _PREFIX
    found = Distribution.discover() if paths is None else Distribution.discover(path=list(paths))
    entries: list[Entry] = []
    notices: list[str] = []
    for offer in _first_of_each(_readable(found, group, notices), notices):
        entries += _entries(offer, notices)
    plugins = tuple(entry for entry in entries if entry.kind != COMMAND)
    return Catalog(plugins, tuple(notices), tuple(entry for entry in entries if entry.kind == COMMAND))


def _readable(found: Iterable[Distribution], group: str, notices: list[str]) -> Iterator[_Offer]:
    """The offers of distributions that name ``group``; one with broken metadata gets a notice and is skipped."""
    for distribution in found:
        if group not in (distribution.read_text("entry_points.txt") or ""):
            continue
        folder = str(Path(str(distribution.locate_file(""))).resolve())
        try:
            metadata, points = distribution.metadata, tuple(distribution.entry_points)
            name, version = metadata["Name"], metadata["Version"]
            requires = tuple(metadata.get_all("Requires-Dist") or distribution.requires or ())
        except Exception as cause:  # metadata is third-party text: anything may be wrong with it
            notices.append(f"a distribution in {folder} is ignored: its metadata is broken: {cause}")
            continue
        if name and version and points:
            yield _Offer(name, version, requires, points, folder)
        else:
            notices.append(f"a distribution in {folder} is ignored: its metadata has no name")


def _first_of_each(found: Iterable[_Offer], notices: list[str]) -> Iterator[_Offer]:
    """Drop later copies of a distribution: the import system would find the first, too."""
    seen: dict[str, _Offer] = {}
    for offer in found:
        first = seen.setdefault(offer.plain_name, offer)
        if first is offer:
            yield offer
        elif (first.version, first.folder) != (offer.version, offer.folder):  # equal when a folder is on the path twice
            notices.append(
                f"{offer.plain_name} is installed twice: {first.version} in {first.folder} is used, "
                f"{offer.version} in {offer.folder} is ignored; uninstall one of them"
            )


def _entries(offer: _Offer, notices: list[str]) -> Iterator[Entry]:
    name, version = offer.plain_name, offer.version
    wants = _requires_kernel(offer, notices)
    seen: set[tuple[str, str]] = set()
    for point in offer.points:
        if not point.group.startswith(_PREFIX):
            continue
        kind = _KIND_OF_GROUP.get(point.group)
        if kind is None:
            notices.append(_unknown_group(point, f"{name} {version}"))
        elif kind == COMMAND and not _COMMAND_NAME.fullmatch(point.name):
            notices.append(
                f"{name} {version} offers {point.name!r}, "
                "which can be no command; write lower-case words with a full stop between them, as data.cache"
            )
        elif (kind, point.name) in seen:
            notices.append(f"{name} {version} offers {kind}={point.name} twice: the first is used")
        else:
            seen.add((kind, point.name))
            yield Entry(kind, point.name, point.value, name, version, wants, offer.folder)


def _unknown_group(point: EntryPoint, source: str) -> str:
    hint = did_you_mean(point.group, _KIND_OF_GROUP) or "the groups are " + ", ".join(_KIND_OF_GROUP)
    return f"{source} offers {point.name!r} in the unknown group {point.group!r}, which is ignored; {hint}"


def _requires_kernel(offer: _Offer, notices: list[str]) -> str:
    """The specifier of the requirement on the kernel that applies here, as ``>=0.1,<0.2``."""
    for line in offer.requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            notices.append(f"{offer.name} {offer.version} has an unreadable requirement {line!r}")
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if canonicalize_name(requirement.name) == KERNEL and applies:
            return str(requirement.specifier)
    return ""


class SourceDigests:
    """Digests of modules, cached by package."""

    def __init__(self) -> None:
        self._known: dict[ModuleType, str] = {}

    def of(self, module: ModuleType) -> str:
        """As :func:`source_digest`."""
        package = _outermost_package(module)
        if package not in self._known:
            self._known[package] = _digest(package)
        return self._known[package]


def source_digest(module: ModuleType) -> str:
    """SHA-256 over the Python files of the package that ``module`` belongs to, or over its one file.

    The files are found through the imported module and not through the distribution's RECORD, which lists no sources
    when it is installed as editable. Names are part of the digest, relative to the package.
    """
    return _digest(_outermost_package(module))


def _digest(package: ModuleType) -> str:
    if not hasattr(package, "__path__"):
        return sha256(_bytes_of(package)).hexdigest()
    total = sha256()
    for folder in package.__path__:
        for parts in sorted(_python_files(folder)):
            code = Path(folder, *parts).read_bytes()
            total.update(f"{'/'.join(parts)} {len(code)}\n".encode() + code)
    return total.hexdigest()


def _python_files(folder: str) -> Iterator[tuple[str, ...]]:
    """The Python files below ``folder``, each as the names that lead to it: quicker than by rglob."""
    for place, _, names in os.walk(folder):
        inner = Path(place).relative_to(folder).parts
        yield from ((*inner, name) for name in names if name.endswith(".py"))


def _outermost_package(module: ModuleType) -> ModuleType:
    """The outermost regular package around ``module``; namespace packages are skipped, since others share them."""
    parts = module.__name__.split(".")
    for count in range(1, len(parts)):
        package = sys.modules.get(".".join(parts[:count]))
        if package is not None and getattr(package, "__file__", None):
            return package
    return module


def _bytes_of(module: ModuleType) -> bytes:
    """The module's file; its name where there is no file, as in a notebook."""
    file = getattr(module, "__file__", None)
    return Path(file).read_bytes() if file and Path(file).is_file() else module.__name__.encode()  # of a prompt
