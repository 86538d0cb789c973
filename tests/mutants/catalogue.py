"""The list of mutants: faults that somebody might write and no tool plants, each with the tests that must notice it.

They lie in ``field.toml`` and ``ours.toml`` beside this file, a hundred at most. A table ``[[file]]`` names a
``module`` and the ``tests`` of its mutants; a ``[[file.mutant]]`` has an ``id``, says what it ``breaks``, and replaces
the text ``find``, which occurs once in the module, by ``put``. ``tests`` of its own take the place of the file's, and
words after a path choose among its tests, as pytest's ``-k``; with ``nightly`` among them, among the nightly ones.
``survives`` says why no test can notice it, ``bug`` which one of another trainer it rebuilds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Where import packages lie, in the root of a checkout.
SOURCES = ("core/src", "core/*/src", "cli/src", "plugins/*/*/src")
LISTS = Path(__file__).parent


@dataclass(frozen=True)
class Mutant:
    """One fault in one module, see above."""

    id: str
    breaks: str
    module: str
    find: str
    put: str
    tests: tuple[str, ...]
    survives: str = ""
    bug: str = ""

    def source(self, root: Path) -> Path:
        """The file of its module in the checkout at ``root``. Raises LookupError."""
        try:
            return source_of(self.module, root)
        except LookupError as error:
            raise LookupError(f"{self.id}: {error}") from None

    def planted(self, source: str) -> str:
        """``source`` with the fault. Raises LookupError where its text does not occur exactly once."""
        if (count := source.count(self.find)) != 1:
            raise LookupError(f"{self.id}: {self.find!r} occurs {count} times in {self.module}")
        return source.replace(self.find, self.put)


def source_of(module: str, root: Path) -> Path:
    """The file of ``module`` in the checkout at ``root``. Raises LookupError."""
    parts = module.split(".")
    names = (Path(*parts).with_suffix(".py"), Path(*parts, "__init__.py"))
    folders = (folder for pattern in SOURCES for folder in root.glob(pattern))
    found = [file for folder in folders for name in names if (file := folder / name).is_file()]
    if len(found) != 1:
        raise LookupError(f"{len(found)} files are module {module}")
    return found[0]


def read_mutants(folder: Path = LISTS) -> Iterator[Mutant]:
    """All mutants of the lists in ``folder``: those of the field first."""
    for path in (folder / "field.toml", folder / "ours.toml"):
        for file in tomllib.loads(path.read_text(encoding="utf-8"))["file"]:
            for entry in file["mutant"]:
                tests = tuple(entry.pop("tests", file["tests"]))
                yield Mutant(module=file["module"], tests=tests, **entry)


def faults(mutants: list[Mutant], root: Path) -> Iterator[str]:
    """What is wrong with the lists themselves: a text that is gone, a test that is not there, a name given twice."""
    ids = [mutant.id for mutant in mutants]
    yield from (f"{name}: given twice" for name in sorted({name for name in ids if ids.count(name) > 1}))
    for mutant in mutants:
        try:
            source = mutant.source(root)
            compile(mutant.planted(source.read_text(encoding="utf-8")), source, "exec")
        except (LookupError, SyntaxError) as error:
            yield str(error) if isinstance(error, LookupError) else f"{mutant.id}: {error}"
        if not mutant.tests or mutant.find == mutant.put:
            yield f"{mutant.id}: it has no tests, or changes nothing"
        paths = (test.split()[0].partition("::")[0] for test in mutant.tests)
        yield from (f"{mutant.id}: there is no {path}" for path in paths if not (root / path).exists())
