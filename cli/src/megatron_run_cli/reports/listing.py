"""The output of ``megatron-run plugins list|info|why`` as data. Listing imports no plugin and nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, metadata
from typing import TYPE_CHECKING

from megatron_run.contracts.plugin import COMMAND, KINDS
from megatron_run.errors import PluginError
from megatron_run.registry.choose import choose, kernel_problem
from megatron_run.registry.discover import BUILT_IN, Catalog, Entry, scan
from megatron_run_cli.reports.probe import Probe, probe

if TYPE_CHECKING:
    from megatron_run.registry.loaded_plugin import Plugin
    from megatron_run_cli.reports.keys import Description


#: Why somebody who types a place, the words after ``megatron-run``, does not get a package's command there, or empty.
Obstacle = Callable[[Catalog, Sequence[str]], str]


def no_obstacle(_catalog: Catalog, _place: Sequence[str]) -> str:
    """Without a command line nothing stands in the way."""
    return ""


def summary_of(distribution: str) -> str:
    """The line that ``distribution`` says of itself, without an import; the engine's and kernel's is of no plugin."""
    if not distribution or distribution in BUILT_IN:  # a file has none
        return ""
    with suppress(PackageNotFoundError):
        return next(iter(metadata(distribution).get_all("Summary") or ()), "")
    return ""


@dataclass(frozen=True)
class ListedPlugin:
    """One installed plugin, or a command of a package.

    ``problem`` says why choosing it would fail, as far as is known; empty: nothing is known. ``ambiguous``: the only
    problem is that its name alone does not choose it. ``checked``: it was imported to find out.
    ``refusal``: then also why no device of this machine can run it, as without a library that it needs.
    """

    kind: str
    name: str
    distribution: str
    version: str
    location: str
    builtin: bool
    problem: str = ""
    ambiguous: bool = False
    checked: bool = False
    refusal: str = ""

    @property
    def state(self) -> str:
        """``BROKEN``, ``AMBIGUOUS``, ``cannot run`` here, ``ok`` when it was imported, empty when nothing is known."""
        if self.problem:
            return "AMBIGUOUS" if self.ambiguous else "BROKEN"
        return "cannot run" if self.refusal else "ok" if self.checked else ""


@dataclass(frozen=True)
class Listing:
    """Every installed plugin by kind, built-ins first, and the notices of the scan."""

    plugins: tuple[ListedPlugin, ...]
    notices: tuple[str, ...]


def list_plugins(
    catalog: Catalog | None = None,
    *,
    check: bool = False,
    obstacle: Obstacle = no_obstacle,
) -> Listing:
    """The installed plugins and commands, from metadata alone.

    With ``check`` each that fits this kernel is imported, in a child. ``obstacle`` says which commands cannot be typed;
    it imports the packages' groups that hold commands of others.
    """
    catalog = scan() if catalog is None else catalog
    entries = [entry for kind in (*KINDS, COMMAND) for entry in catalog.of_kind(kind)]
    listed = [_listed(entry, catalog, obstacle) for entry in entries]
    if check:
        healthy = [entry for entry, each in zip(entries, listed, strict=True) if each.state != "BROKEN"]
        found = {each.entry: each for each in probe(healthy)}
        listed = [_checked(each, found.get(entry)) for entry, each in zip(entries, listed, strict=True)]
    return Listing(tuple(listed), catalog.notices)


def plugin_info(kind: str, reference: str, catalog: Catalog | None = None) -> Description:
    """The plugin's own account of itself; it is imported in a child process. ``--plugin`` takes ``kind=reference``.

    Raises :class:`PluginError` when there is no such plugin, or it is broken.
    """
    from megatron_run_cli.reports.keys import Description

    entry = choose(scan() if catalog is None else catalog, kind, reference, "the command line")
    (answer,) = probe([entry], refusals=False)
    if answer.description is None:
        raise PluginError(f"plugin {entry} of {entry.source} is broken", why=answer.error)
    return replace(Description.from_json(answer.description), summary=summary_of(entry.distribution))


@dataclass(frozen=True)
class Candidate:
    """A plugin of a kind and why it won, or why it did not."""

    plugin: ListedPlugin
    chosen: bool
    reason: str


def why(kind: str, chosen: Sequence[Plugin], catalog: Catalog | None = None) -> tuple[Candidate, ...]:
    """The candidates of ``kind``: first the ``chosen`` ones of a resolved run, in their order, then the others."""
    catalog = scan() if catalog is None else catalog
    winners = [Candidate(_of(plugin), True, plugin.origin) for plugin in chosen]
    taken = {(each.plugin.distribution, each.plugin.name) for each in winners}
    others = (entry for entry in catalog.of_kind(kind) if (entry.distribution, entry.name) not in taken)
    losers = [_listed(entry, catalog) for entry in others]
    return (*winners, *(Candidate(each, False, each.problem or "not asked for") for each in losers))


def _of(plugin: Plugin) -> ListedPlugin:
    builtin = plugin.distribution in BUILT_IN
    return ListedPlugin(
        plugin.kind, plugin.name, plugin.distribution, plugin.version, plugin.location, builtin, checked=True
    )


def _checked(plugin: ListedPlugin, found: Probe | None) -> ListedPlugin:
    """``plugin`` after its import, whose outcome is ``found``; None: it was not imported."""
    if found is None:
        return plugin
    ambiguous = plugin.ambiguous and not found.error
    problem = found.error or plugin.problem
    return replace(plugin, checked=True, problem=problem, ambiguous=ambiguous, refusal=found.refusal)


def command_candidates(catalog: Catalog, obstacle: Obstacle) -> tuple[Candidate, ...]:
    """The commands of packages, each with why somebody who types it gets it, or does not."""
    listed = [_listed(entry, catalog, obstacle) for entry in catalog.of_kind(COMMAND)]
    return tuple(Candidate(each, not each.problem, each.problem or "no other package offers it") for each in listed)


def _listed(entry: Entry, catalog: Catalog, obstacle: Obstacle = no_obstacle) -> ListedPlugin:
    others = [other.source for other in catalog.offering(entry.kind, entry.name) if other != entry]
    instead = "uninstall one" if entry.kind == COMMAND else f"choose {entry.distribution}:{entry.name}"
    shared = f"{' and '.join(others)} offers {entry} too: {instead}" if others else ""
    unfit = kernel_problem(entry)
    if entry.kind == COMMAND:
        unfit = unfit or obstacle(catalog, entry.name.split("."))
    return ListedPlugin(
        entry.kind,
        entry.name,
        entry.distribution,
        entry.version,
        entry.location,
        entry.builtin,
        problem=unfit or shared,
        ambiguous=bool(shared and not unfit),
    )
