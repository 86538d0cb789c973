"""Draws compositions until enough are compared, and makes those that differ simple."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from shlex import quote

from packaging.utils import canonicalize_name

from megatron_run.contracts.plugin import KINDS
from megatron_run.errors import InputError
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import Entry, scan
from megatron_run.registry.load import load
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_testing.conformance import project_entries
from megatron_run_testing.conformance.composition.compare import NAMES, Compared, compare, refusal, write_documents
from megatron_run_testing.conformance.composition.space import Composition, Space

#: Compositions that are trained by one set of ranks.
_AT_ONCE = 20
#: Refused compositions for each one that is asked for, after which nothing is expected any more.
_PATIENCE = 20

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Difference:
    """The simplest composition found that is not equal to its single process, what differs, and what to type."""

    composition: str
    faults: tuple[str, ...]
    commands: tuple[str, ...]


@dataclass
class Findings:
    """Findings of a campaign. ``largest`` are the greatest differences taken for rounding in fp32, by name.

    ``measured`` counts those that are equal because single processes that round otherwise differ as much.
    """

    plugin: str = ""
    equal: int = 0
    measured: int = 0
    different: int = 0
    refused: int = 0
    differences: list[Difference] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether everything was equal."""
        return not self.different

    def __str__(self) -> str:
        named = f"{self.plugin}: " if self.plugin else ""
        largest = ", ".join(f"{name} {value:.1e}" for name, value in self.largest.items())
        compared = self.equal + self.different
        measured = f" ({self.measured} as far apart as roundings of one process)" if self.measured else ""
        return (
            f"{named}{self.equal} of {compared} compositions equal{measured}, {self.refused} refused, in "
            f"{self.seconds:.0f} s; "
            f"largest differences in fp32: {largest}"
        )


def check_composition(
    target: str, sets: Sequence[str] = (), count: int = 20, seed: int = 1, progress: Progress = lambda _: None
) -> list[Findings]:
    """Compare ``count`` compositions of each plugin of ``target`` with the single process.

    ``target`` is ``KIND=NAME``, an installed distribution, its folder, or a file; ``sets`` are settings of every run.
    ``progress`` is called with lines about the progress. Raises :class:`~megatron_run.errors.RunError` where there is
    nothing to compose.
    """
    plugins = [load(entry, "plugins check") for entry in _entries(target)]
    composed = [each for each in plugins if each.kind not in ("observer", "format")]
    space = Space.of_installed(tuple(sets))
    return [search(space.around(plugin), count, seed, progress, plugin) for plugin in composed or plugins]


def _entries(target: str) -> tuple[Entry, ...]:
    """The plugins that ``target`` means, which must be installed, or a file: every rank plans with them anew."""
    kind, equals, name = target.partition("=")
    if target.endswith(".py") and not (equals and kind in KINDS):
        file = Path(target).resolve()
        if not file.is_file():
            raise InputError(f"the plugin file {target} cannot be read", why=f"there is no {file}")
        return (Entry("", file.stem, str(file), location=str(file)),)
    catalog = scan()
    if equals:
        return (choose(catalog, kind, name, f"plugins check {target}"),)
    distribution, folder = canonicalize_name(target), Path(target)
    if folder.is_dir():
        distribution = canonicalize_name(project_entries(folder)[0].distribution)
    found = tuple(entry for entry in catalog.entries if entry.distribution == distribution)
    if not found:
        raise InputError(
            f"{target} offers no installed plugin",
            why="compositions are planned and trained with what is installed",
            fix=f"type: pip install -e {quote(target)}"
            if folder.is_dir()
            else "give KIND=NAME, a file, or install the package",
        )
    return found


def search(
    space: Space, count: int, seed: int, progress: Progress = lambda _: None, plugin: Plugin | None = None
) -> Findings:
    """Compare ``count`` compositions of ``space``. Raises :class:`InputError` where all that is drawn is refused."""
    random, found, start = Random(seed), Findings(str(plugin or "")), time.monotonic()
    reasons, wrong = Counter[str](), list[tuple[Composition, Compared]]()
    while (missing := count - found.equal - len(wrong)) > 0:
        drawn = _planned(space, random, min(_AT_ONCE, missing), reasons)
        for composition, compared in zip(drawn, compare(drawn), strict=True):
            if compared.refused:
                reasons[compared.refused] += 1
            elif compared.faults:
                wrong.append((composition, compared))
                progress(f"differs: {composition}: {'; '.join(compared.faults)}")
            else:
                found.equal += 1
                _note(found, composition, compared)
                if compared.beyond and not composition.rounded:
                    found.measured += 1
                    progress(f"rounding alone differs as much: {composition}: {compared.largest}")
        found.refused = reasons.total()
        counts = f"{found.equal} equal, {len(wrong)} different, {found.refused} refused"
        progress(f"{counts}, {time.monotonic() - start:.0f} s")
    found.different = len(wrong)
    found.differences = _differences(_simplest_of(wrong, progress)) if wrong else []
    found.seconds = time.monotonic() - start
    return found


def simplest(composition: Composition, compared: Compared) -> tuple[Composition, Compared]:
    """A composition with as many axes at their simplest, and on as few ranks, as still differs.

    Most faults need a split and at most one more choice. So these are tried first, and leaving out single choices last.
    """
    for simpler in (composition.barest(), composition.with_one(), composition.simpler()):
        tried = list(simpler)
        for each, seen in zip(tried, compare(tried), strict=True):
            if seen.faults:
                return (each, seen) if each.minimal else simplest(each, seen)
    return composition, compared


def _simplest_of(
    wrong: Sequence[tuple[Composition, Compared]], progress: Progress
) -> list[tuple[Composition, Compared]]:
    """The simplest compositions. What contains one of them is taken to differ for the same reason."""
    bare = sorted(
        {each for composition, _ in wrong for each in composition.barest()}, key=lambda each: each.sizes.world
    )
    progress(f"making {len(wrong)} simpler")
    splits = [(each, seen) for each, seen in zip(bare, compare(bare), strict=True) if seen.faults]
    found = list[tuple[Composition, Compared]]()
    for composition, compared in sorted(wrong, key=lambda each: len(each[0].choices)):
        if any(composition.contains(simple) for simple, _ in found):
            continue
        split = next((each for each in splits if composition.contains(each[0])), None)
        found.append(split or simplest(composition, compared))
    return found


def _differences(found: Sequence[tuple[Composition, Compared]]) -> list[Difference]:
    documents = write_documents(_kept())
    return [
        Difference(str(composition), tuple(seen.faults), tuple(composition.commands("composition", documents)))
        for composition, seen in found
    ]


def _kept() -> Path:
    """A folder that outlives the campaign, for what the commands that it prints read."""
    from megatron_run.files.user_cache import user_cache

    return user_cache("composition")


def _note(found: Findings, composition: Composition, compared: Compared) -> None:
    if not composition.rounded and not compared.beyond:
        for name, value in zip(NAMES, compared.largest, strict=True):
            found.largest[name] = max(found.largest[name], value)


def _planned(space: Space, random: Random, count: int, reasons: Counter[str]) -> list[Composition]:
    """``count`` compositions that can be planned; why others cannot is counted in ``reasons``."""
    found, tried = list[Composition](), 0
    while len(found) < count:
        drawn, tried = space.draw(random), tried + 1
        if why := refusal(drawn):
            reasons[why] += 1
        else:
            found.append(drawn)
        if tried > _PATIENCE * count and not found:
            ((reason, _),) = reasons.most_common(1)
            raise InputError(
                "there is nothing to compare: every composition was refused",
                why=f"most often: {reason}",
                fix="give the options that the plugin needs, as --set model.my_size=8",
            )
    return found
