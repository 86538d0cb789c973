"""``config explain`` and ``config schema``: the kernel's keys and those of plugins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from megatron_run.config.explain import KeyInfo, json_schema, kernel_keys, model_keys
from megatron_run.config.origin import KIND_SECTIONS, section_of
from megatron_run.contracts.plugin import RUN_KINDS
from megatron_run.errors import InputError, PluginError, did_you_mean
from megatron_run.planning.show import show_json
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import scan
from megatron_run.registry.load import Plugin, load

if TYPE_CHECKING:
    from megatron_run.planning.run import ResolvedRun


def explain(key: str, run: ResolvedRun | None = None) -> str:
    """What ``key`` (``train.lr``), or each key of a section (``train``), means: type, default, bounds, meaning.

    With ``run``, also the value it has there and where it came from. Options are those of the run's plugins, or of
    every installed plugin. Raises :class:`InputError` for an unknown key.
    """
    parts = tuple(key.split("."))
    wanted = (section_of(parts[0]) if section_of(parts[0]) in KIND_SECTIONS else parts[0], *parts[1:])
    known = list(all_keys(_of_run(run) if run is not None else installed_plugins()[0]))
    found = [info for info in known if info.key[: len(wanted)] == wanted]
    if not found:
        names = [info.name for info in known]
        raise InputError(
            f"there is no key {key!r}",
            fix=did_you_mean(key, names) or f"the sections are {', '.join(dict.fromkeys(map(_section, names)))}",
        )
    values = show_json(run) if run is not None else {}
    return "\n\n".join(_with_value(info, values) for info in found)


def _section(name: str) -> str:
    return name.partition(".")[0]


def _with_value(info: KeyInfo, values: dict[str, Any]) -> str:
    if info.name not in values:
        return str(info)
    value = values[info.name]
    return f"{info}\n  {'here':10} {value['value']} (from {value['origin']})"


def all_keys(plugins: Iterable[Plugin]) -> Iterator[KeyInfo]:
    """Every key of the kernel, then every option of ``plugins``."""
    yield from kernel_keys()
    for plugin in plugins:
        yield from model_keys(plugin.options_model, (section_of(plugin.kind),), str(plugin))


def schema(plugins: Iterable[Plugin]) -> dict[str, Any]:
    """The JSON schema of a configuration that may use any of ``plugins``."""
    options: dict[str, dict[str, Any]] = {kind: {} for kind in RUN_KINDS}
    for plugin in plugins:
        options[plugin.kind][plugin.name] = plugin.options_model
    return json_schema(options)


def installed_plugins() -> tuple[tuple[Plugin, ...], tuple[str, ...]]:
    """Every installed plugin that a run can choose and that loads, and one notice for each that does not."""
    catalog = scan()
    plugins, notices = [], []
    for entry in (entry for entry in catalog.entries if entry.kind in RUN_KINDS):
        try:
            plugins.append(
                load(choose(catalog, entry.kind, f"{entry.distribution}:{entry.name}", "installed"), "installed")
            )
        except PluginError as error:
            notices.append(str(error))
    return tuple(plugins), tuple(notices)


def _of_run(run: ResolvedRun) -> list[Plugin]:
    return [plugin for many in run.plugins.values() for plugin in many]
