"""Selects one installed plugin by name. Uses metadata only: no plugin is imported."""

from __future__ import annotations

from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from megatron_run import __version__
from megatron_run.contracts.plugin import check_kind
from megatron_run.errors import EngineMissingError, PluginError
from megatron_run.errors.wording import advice, did_you_mean
from megatron_run.registry.discover import KERNEL, Catalog, Entry
from megatron_run.registry.known import known_plugin

__all__ = ["check_kind", "choose", "kernel_problem"]


def choose(catalog: Catalog, kind: str, reference: str, origin: str) -> Entry:
    """The entry that ``reference`` means: ``NAME``, ``DIST:NAME`` or a file such as ``./mine.py``.

    ``origin`` says where the choice came from and enters every message. Raises :class:`InputError` for an unknown
    kind; :class:`PluginError` for a name that nothing, or more than one distribution, offers, for a missing file, and
    for a plugin that was made for another version of the kernel.
    """
    kind = check_kind(kind, origin)
    entry = _from_file(kind, reference, origin) if is_file(reference) else _installed(catalog, kind, reference, origin)
    problem = kernel_problem(entry)
    if problem:
        raise PluginError(
            f"plugin {entry} of {entry.source} does not fit this kernel",
            why=problem,
            origin=origin,
            fix=f"install a version of {entry.distribution} made for {KERNEL} {__version__}",
        )
    return entry


def kernel_problem(entry: Entry) -> str:
    """Why the metadata of ``entry`` rules out this kernel, or an empty string."""
    try:
        fits = SpecifierSet(entry.requires_kernel).contains(__version__, prereleases=True)
    except InvalidSpecifier:
        return f"its requirement {KERNEL}{entry.requires_kernel} cannot be read"
    return "" if fits else f"it needs {KERNEL}{entry.requires_kernel}, and {__version__} is installed"


def is_file(reference: str) -> bool:
    """Whether ``reference`` is the path of a single-file plugin, and no name."""
    return reference.endswith(".py") or "/" in reference


def _from_file(kind: str, reference: str, origin: str) -> Entry:
    path = Path(reference).expanduser().resolve()
    if not path.is_file():
        why = "it is a folder" if path.is_dir() else f"there is no {path}"
        fix = f"write {kind}=NAME, or the path of a Python file"
        raise PluginError(f"the plugin file {reference} cannot be read", why=why, origin=origin, fix=fix)
    return Entry(kind, path.stem, str(path), location=str(path))


def _installed(catalog: Catalog, kind: str, reference: str, origin: str) -> Entry:
    distribution, colon, name = reference.rpartition(":")
    offers = catalog.offering(kind, name)
    if colon:
        wanted = [entry for entry in offers if entry.distribution == canonicalize_name(distribution)]
        if offers and not wanted:
            raise _wrong_distribution(kind, distribution, offers, origin)
        offers = tuple(wanted)
    if not offers:
        raise _unknown_name(catalog, kind, name, origin)
    if len(offers) > 1:
        raise _ambiguous(offers, origin)
    return offers[0]


def _unknown_name(catalog: Catalog, kind: str, name: str, origin: str) -> PluginError:
    installed = [entry.name for entry in catalog.of_kind(kind)]
    known = known_plugin(kind, name)
    hint = known.how_to_get if known else did_you_mean(name, installed)
    listed = ", ".join(dict.fromkeys(installed)) or "none"
    misplaced = [notice for notice in catalog.notices if f"offers {name!r} in the unknown group" in notice]
    if misplaced:  # a hyphen in the place of the underscore: the package is installed and its plugin is not found
        return PluginError(f"no installed plugin is {kind}={name}", why=misplaced[0], origin=origin)
    error = EngineMissingError if known and known.builtin else PluginError
    return error(f"no installed plugin is {kind}={name}", origin=origin, fix=advice(hint, f"installed: {listed}"))


def _wrong_distribution(kind: str, distribution: str, offers: tuple[Entry, ...], origin: str) -> PluginError:
    choices = [_typed(entry) for entry in offers]
    return PluginError(
        f"{distribution} offers no {kind}={offers[0].name}",
        origin=origin,
        fix=f"choose {' or '.join(choices)}",
    )


def _ambiguous(offers: tuple[Entry, ...], origin: str) -> PluginError:
    sources = [f"{entry.source}{' (built in)' if entry.builtin else ''}" for entry in offers]
    return PluginError(
        f"plugin {offers[0]} is offered by {len(offers)} distributions",
        why=", ".join(sources),
        origin=origin,
        fix=f"choose {' or '.join(_typed(entry) for entry in offers)}",
    )


def _typed(entry: Entry) -> str:
    return f"--plugin {entry.kind}={entry.distribution}:{entry.name}"
