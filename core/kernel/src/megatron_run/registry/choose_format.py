"""Choosing a format for one conversion: by its name, or by the files of what is to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from megatron_run.contracts.format import (
    ADAPTERS,
    EXPORT,
    FORMAT_ABILITIES,
    IMPORT,
    LAUNCH_SCRIPT,
    PUBLISH,
    Card,
    Fetched,
    ForeignAdapters,
    Format,
    Publisher,
    TranslatedScript,
    Wanted,
    Weights,
)
from megatron_run.errors import CheckpointError, InputError, PluginError, RunError
from megatron_run.errors.wording import advice, did_you_mean, from_hub, near_path
from megatron_run.registry.choose import choose, is_file
from megatron_run.registry.discover import Catalog, Entry, scan
from megatron_run.registry.hooks import in_one_line
from megatron_run.registry.known import KNOWN, known_plugin
from megatron_run.registry.load import load
from megatron_run.registry.loaded_plugin import Plugin

_KIND = "format"
#: What reads a source.
_READING = (IMPORT, ADAPTERS)
#: What to say of a format without an ability.
_CANNOT = dict(
    zip(
        FORMAT_ABILITIES,
        (
            *("cannot be imported", "cannot be exported to", "translates no launch scripts", "holds no adapters"),
            *("fetches nothing", "publishes nothing"),
        ),
        strict=True,
    )
)


@dataclass(frozen=True)
class ChosenFormat:
    """A loaded plugin of kind ``format`` and the object that it made.

    Its methods are those of :class:`~megatron_run.contracts.Format`. An exception that is no :class:`RunError` becomes
    a :class:`PluginError` that names the plugin.
    """

    plugin: Plugin
    made: Format

    @property
    def name(self) -> str:
        """The name of the plugin, as ``--from`` and ``--to`` take it."""
        return self.plugin.name

    def recognises(self, source: Path) -> bool:
        """Whether the files in ``source`` are of this format."""
        with self._named("recognises"):
            return self.made.recognises(source)

    def read(self, source: Path) -> Weights:
        """The model in ``source``."""
        with self._named("read"):
            return self.made.read(source)

    def read_adapters(self, source: Path) -> ForeignAdapters:
        """The adapters in ``source``."""
        with self._named("read_adapters"):
            return self.made.read_adapters(source)

    def write(self, weights: Weights, folder: Path) -> None:
        """Write the model into the empty ``folder``. An OSError passes: it is the disk's failure."""
        with self._named("write", (RunError, OSError)):
            self.made.write(weights, folder)

    def translate_script(self, script: Path) -> TranslatedScript:
        """The configuration that a launch script asks for."""
        with self._named("translate_script"):
            return self.made.translate_script(script)

    def fetch(self, name: str, wanted: Wanted, tell: Callable[[str], None], before: Path | None = None) -> Fetched:
        """Fetch what is ``wanted`` of ``name``."""
        with self._named("fetch"):
            return self.made.fetch(name, wanted, tell, before)

    def publisher(self, name: str) -> Publisher:
        """The place ``name``. Raises :class:`InputError` for a format that sends models nowhere."""
        if PUBLISH not in self.plugin.provides:
            raise InputError(f"{self.plugin} {_CANNOT[PUBLISH]}", origin="--push", fix="leave out --push")
        with self._named("publisher"):
            return self.made.publisher(name)

    def readme(self, publisher: Publisher, card: Card) -> str:
        """The README with which ``publisher`` sends a folder."""
        with self._named("readme"):
            return publisher.readme(card)

    def send(self, publisher: Publisher, folder: Path) -> str:
        """Send ``folder``; where it can be seen. An OSError passes: it is the disk's failure."""
        with self._named("send", (RunError, OSError)):
            return publisher.send(folder)

    @contextmanager
    def _named(self, method: str, passing: tuple[type[Exception], ...] = (RunError,)) -> Iterator[None]:
        try:
            yield
        except passing:
            raise
        except (Exception, SystemExit) as cause:
            raise self.plugin.failed(method, in_one_line(cause)) from cause


def format_to_read(
    source: Path, choice: str | None = None, catalog: Catalog | None = None, *, adapters: bool = False
) -> ChosenFormat:
    """The format in which ``source`` is read: the one that ``choice`` names, else the one that recognises its files.

    With ``adapters`` it may be one that reads adapters in the place of a model. Raises a :class:`RunError` where there
    is no such source or format, and where several formats recognise it; :class:`InputError` for adapters that are no
    model.
    """
    if not source.exists():
        fix = near_path(source) or advice("name the file or folder of the model", from_hub(source))
        raise CheckpointError(f"there is no file or folder {source}", fix=fix)
    catalog = scan() if catalog is None else catalog
    if choice:
        return _named(choice, _READING if adapters else (IMPORT,), f"--from {choice}", catalog)
    readable, broken = installed_formats(_READING, catalog)
    found = []
    for each in readable:
        try:
            found += [each] if each.recognises(source) else []
        except PluginError as error:
            broken.append(str(error))
    if len(found) > 1:
        choices = " or ".join(f"--from {_choice_of(each.plugin, catalog)}" for each in found)
        raise CheckpointError(f"{source} is in {len(found)} formats", fix=f"say which: {choices}")
    if found:
        if not adapters and IMPORT not in found[0].plugin.provides:
            raise InputError(
                f"{source} holds adapters, and not the model that they adapt",
                fix=f"import them: megatron-run import {quote(str(source))} NEW --base MODEL, then name NEW",
            )
        return found[0]
    known = "; ".join([*(f"{each.name}: {each.made.files}" for each in readable), *broken])
    absent = (known for known in KNOWN if known.kind == _KIND and not catalog.offering(_KIND, known.name))
    more = " or ".join(dict.fromkeys(each.how_to_get for each in absent if each.provides & {*_READING}))
    fix = advice("say which: --from FORMAT", more and f"for more formats: {more}")
    raise CheckpointError(f"{source} is in no format that is known", why=known, fix=fix)


def format_to_write(choice: str) -> ChosenFormat:
    """The format ``choice``, which can be written. Raises a :class:`RunError`."""
    return _named(choice, (EXPORT,), f"--to {choice}", scan())


def format_of_scripts(choice: str, origin: str, catalog: Catalog | None = None) -> ChosenFormat:
    """The format ``choice``, whose trainer's launch scripts can be translated. Raises a :class:`RunError`."""
    return _named(choice, (LAUNCH_SCRIPT,), origin, scan() if catalog is None else catalog)


def _named(choice: str, abilities: tuple[str, ...], origin: str, catalog: Catalog) -> ChosenFormat:
    """The format that ``choice`` names, which has one of ``abilities``: NAME, DIST:NAME or a file ``./mine.py``."""
    name = choice.rpartition(":")[2]
    if is_file(choice) or catalog.offering(_KIND, name) or known_plugin(_KIND, name):
        chosen = _load(choose(catalog, _KIND, choice, origin), origin)
        if chosen.plugin.provides & {*abilities}:
            return chosen
        what, guess = f"{chosen.plugin} {_CANNOT[abilities[0]]}", False
    else:
        what, guess = f"there is no format {choice!r}", True
    names = [each.name for each in installed_formats(abilities, catalog)[0]]
    listed = f"known are {', '.join(names) or 'none'}"
    raise InputError(what, fix=(guess and did_you_mean(choice, names)) or listed)


def installed_formats(abilities: tuple[str, ...], catalog: Catalog) -> tuple[list[ChosenFormat], list[str]]:
    """Every installed format with one of ``abilities``, loaded, and what is wrong with those that cannot be loaded."""
    found, broken = [], []
    for entry in catalog.of_kind(_KIND):
        try:
            chosen = _load(choose(catalog, _KIND, f"{entry.distribution}:{entry.name}", "installed"), "installed")
        except PluginError as error:
            broken.append(f"{entry} is left out: {error.why or error.what}")
        else:
            found += [chosen] if chosen.plugin.provides & {*abilities} else []
    return found, broken


def _load(entry: Entry, origin: str) -> ChosenFormat:
    plugin = load(entry, origin)
    made: Format = plugin.create()
    return ChosenFormat(plugin, made)


def _choice_of(plugin: Plugin, catalog: Catalog) -> str:
    """The choice that names this plugin and no other."""
    alone = len(catalog.offering(_KIND, plugin.name)) == 1
    return plugin.reference if alone else f"{plugin.distribution}:{plugin.name}"
