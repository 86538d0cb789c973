"""Checks a plugin (an installed one, the folder of a package, or a single file) by the suite of its kind.

One function per kind applies the suite; each imports its suite when it is called.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from megatron_run.config.fields import fields_of
from megatron_run.config.origin import DEFAULT, Key, Value, section_of
from megatron_run.config.sources import command_line_source
from megatron_run.config.validate import validate
from megatron_run.contracts.plugin import COMMAND, KINDS, SEPARATORS, entry_point_group
from megatron_run.errors import EngineMissingError, Findings, InputError, PluginError, RunError
from megatron_run.errors.install_hint import check_engine
from megatron_run.registry.bare_names import called
from megatron_run.registry.choose import choose
from megatron_run.registry.commands import choose_command, missing_command, words_of
from megatron_run.registry.discover import Catalog, Entry, scan
from megatron_run.registry.hooks import in_one_line
from megatron_run.registry.load import load
from megatron_run.registry.loaded_command import load_command
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_testing import Check


def _scaler(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.scaler import scaler_checks

    return scaler_checks(lambda context: plugin.create(context=context))


def _optimizer(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.optimizer import PluginOptimizer, optimizer_checks

    return optimizer_checks(PluginOptimizer(*_sendable(plugin)), ranks=(1, 2, 4))


def _graph_capture(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run.errors import PluginError
    from megatron_run_testing.build_contexts import current_device
    from megatron_run_testing.graph_capture import graph_capture_checks

    def why_not() -> str:
        """Why the plugin refuses the device on which it is checked; an exception of another type is a failure."""
        try:
            if plugin.info.check_device is not None:
                plugin.info.check_device(str(current_device()), plugin.options)
        except PluginError as refusal:
            return refusal.what
        return ""

    return graph_capture_checks(lambda context: plugin.create(context=context), why_not)


def _schedule(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.schedule import SHAPES, Shape, schedule_checks

    wanted = (plugin.info.suggests.get(f"parallel.{key}", 1) for key in ("pipeline", "chunks"))
    stages, chunks = map(int, wanted)
    suggested = (Shape(stages, chunks, microbatches) for microbatches in (1, stages, 2 * stages + 1))
    return schedule_checks(plugin.create(), tuple(dict.fromkeys((*SHAPES, *suggested))))


def _parallel_layer(*stack: Plugin) -> tuple[Check, ...]:
    """The checks of the last of ``stack``, each stacked on the one before."""
    from megatron_run_testing.parallel_layer import PluginLayers, parallel_layer_checks

    made: PluginLayers | None = None
    for plugin in stack:
        made = PluginLayers(*_sendable(plugin), made)
    assert made is not None  # a stack holds the plugin under test
    provided = frozenset[str]().union(*(plugin.provides for plugin in stack))
    return parallel_layer_checks(
        made,
        ranks=(1, 2, 4) if "parallel.tensor" in provided else (1,),
        sequence="parallel.sequence" in provided,
        context=(2,) if "parallel.context" in provided else (),
    )


def _model(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.model import model_checks

    assert plugin.options is not None  # a model has at least num_layers and vocab_size
    return model_checks(lambda context, options: plugin.with_options(options).create(context=context), plugin.options)


def _data(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.data import PluginData, data_checks

    return data_checks(plugin.create(), create=PluginData(*_sendable(plugin)))


def _observer(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.observer import observer_checks

    return observer_checks(plugin.create)


def _format(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.format import format_checks

    return format_checks(plugin.create(), plugin.info.provides)


#: Kind -> a function from a plugin, with its options set, to its checks. It imports the suite when it is called.
SUITES: Mapping[str, Callable[[Plugin], tuple[Check, ...]]] = MappingProxyType(
    {
        "scaler": _scaler,
        "optimizer": _optimizer,
        "schedule": _schedule,
        "parallel-layer": _parallel_layer,
        "graph-capture": _graph_capture,
        "model": _model,
        "data": _data,
        "observer": _observer,
        "format": _format,
    }
)


def _sendable(plugin: Plugin) -> tuple[Entry, Mapping[str, Any]]:
    """The entry and options from which another process creates the same plugin."""
    assert plugin.entry is not None  # a checked plugin is installed, or is a file
    return plugin.entry, {} if plugin.options is None else plugin.options.model_dump()


def checks_for(plugin: Plugin, below: Sequence[Plugin] = ()) -> tuple[Check, ...]:
    """The checks of its options and of the plugin's kind; for layers, stacked on those ``below``."""
    from megatron_run_testing.conformance.options import option_checks

    suite = _parallel_layer(*below, plugin) if below else SUITES[plugin.kind](plugin)
    return (*option_checks(plugin), *suite)


#: Folders of a project that may contain its import packages, the most likely first.
_SOURCES = ("src", ".")
_VOCABULARY = 64


@dataclass(frozen=True)
class Result:
    """The outcome of one check; ``message`` is the failure, or why there was nothing to try, or empty."""

    name: str
    passed: bool
    message: str = ""

    @property
    def state(self) -> str:
        """The outcome in at most three words."""
        return "FAILED" if not self.passed else "nothing to try" if self.message else "ok"


@dataclass(frozen=True)
class Report:
    """The results of one plugin: ``plugin`` is ``kind=name``, ``source`` is where it comes from."""

    plugin: str
    source: str
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(result.passed for result in self.results)


class _Network(BaseModel):
    """Model options for the contexts of other kinds of plugin."""

    num_layers: int = 2
    vocab_size: int = _VOCABULARY


#: Why somebody who types the words of a command does not get it, or empty.
Obstacle = Callable[[Catalog, Sequence[str]], str]


def check(target: str, sets: Iterable[str] = (), obstacle: Obstacle | None = None) -> tuple[Report, ...]:
    """Run the conformance suite on ``target``: ``KIND=NAME``, ``command=NAME``, the folder of a package, or a file.

    A file may be named as for a run, ``KIND=./mine.py``; so may layers that are stacked,
    ``parallel-layer=BELOW+NAME`` or ``BELOW+./mine.py``, and then the last is under test. A package may offer several
    plugins; each gets a report.
    ``sets`` are options, as in ``--set model.num_layers=2``, for a plugin that cannot be created with its defaults.
    ``obstacle`` is the command line's, which alone knows whether somebody who types a command's words gets it.
    Raises :class:`RunError` if there is nothing to check.
    """
    findings = Findings()
    options = command_line_source(sets, (), findings).values
    findings.settle()
    kind, equals, name = target.partition("=")
    path = Path(name if equals and kind in KINDS else target)
    stacked = bool(equals and "+" in name and SEPARATORS.get(kind) == "+" and not path.is_file())
    if target.endswith(".py") and not stacked:
        if not path.is_file():
            raise PluginError(f"the plugin file {path} cannot be read", why=f"there is no {path.resolve()}")
        file = path.resolve()
        return (_report(Entry("", file.stem, str(file), location=str(file)), options),)
    if stacked:
        *below, top = (choose(scan(), kind, reference, f"plugins check {target}") for reference in name.split("+"))
        return (_report(top, options, below),)
    if equals and kind == COMMAND:
        return (_report_command(_installed_command(name), obstacle),)
    if equals:
        return (_report(choose(scan(), kind, name, f"plugins check {target}"), options),)
    if path.is_dir():
        with _importable(path):
            entries = project_entries(path)
            commands = tuple(_report_command(entry, obstacle) for entry in entries if entry.kind == COMMAND)
            return (*(_report(entry, options) for entry in entries if entry.kind != COMMAND), *commands)
    forms = "give KIND=NAME of an installed plugin, the folder of a package, or a file such as ./mine.py"
    meant = " or ".join(called(target, scan()))
    raise InputError(f"{target!r} is nothing to check", fix=f"did you mean {meant}?" if meant else forms)


def project_entries(folder: Path) -> tuple[Entry, ...]:
    """The plugins and commands that the ``pyproject.toml`` of ``folder`` offers.

    Raises :class:`InputError` if it has none.
    """
    file = folder / "pyproject.toml"
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as cause:
        raise InputError(f"{file} cannot be read", why=str(cause)) from cause
    groups = project.get("entry-points", {})
    entries = tuple(
        Entry(
            kind,
            name,
            value,
            distribution=str(project.get("name", folder.name)),
            version=str(project.get("version", "")),
            location=str(folder.resolve()),
        )
        for kind in (*KINDS, COMMAND)
        for name, value in groups.get(entry_point_group(kind), {}).items()
    )
    if not entries:
        raise InputError(
            f"{file} offers no plugin",
            fix='add its entry point, as [project.entry-points."megatron_run.schedule"]',
        )
    return entries


def make(plugin: Plugin) -> object:
    """The plugin's object, created on one CPU rank; a parallel-layer factory gets the built-in one as its base."""
    if plugin.kind in ("schedule", "data", "observer", "format"):  # made without a context, and so without torch
        return plugin.create()
    import torch

    from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
    from megatron_run_testing.build_contexts import single_process_context

    network = plugin.options if plugin.kind == "model" else None
    context = single_process_context(network or _Network(), dtype=torch.float32)
    return plugin.create(context=context, base=DenseLayers(context))


def _report(entry: Entry, values: Mapping[Key, Value], below: Sequence[Entry] = ()) -> Report:
    results: list[Result] = []
    name = str(entry) if entry.kind else entry.name  # the kind of a file is known after its import
    with _recorded(results, "it can be imported and describes itself"):
        plugin = load(entry, "plugins check")
        name = str(plugin)
    if results[-1].passed:
        plugin = plugin.with_options(_validated(plugin, values))
        with _recorded(results, "its factory makes an object of its kind"):
            make(plugin)
    if results[-1].passed:
        lower = [load(each, "plugins check") for each in below]
        for check in checks_for(plugin, [each.with_options(each.options_model()) for each in lower]):
            with _recorded(results, check.name) as untried:
                untried.append(check.run() or "")
    return Report(name, entry.source, tuple(results))


def _installed_command(name: str) -> Entry:
    catalog, place = scan(), name.replace(" ", ".").split(".")
    if entry := choose_command(catalog, place):
        return entry
    raise missing_command(catalog, place, exact=True) or PluginError(f"no installed package has the command {name!r}")


def _report_command(entry: Entry, obstacle: Obstacle | None) -> Report:
    from megatron_run_testing.conformance.commands import command_checks

    results: list[Result] = []
    with _recorded(results, "its module gives the command that its entry point names"):
        load_command(entry)
    if results[-1].passed and obstacle is not None:
        results.append(_reached(entry, obstacle(scan(kind=COMMAND), entry.name.split("."))))
    if results[-1].passed:
        for check in command_checks(entry):
            with _recorded(results, check.name) as untried:
                untried.append(check.run() or "")
    return Report(str(entry), entry.source, tuple(results))


def _reached(entry: Entry, problem: str) -> Result:
    return Result(f"typing megatron-run {words_of(entry)} reaches it", not problem, problem)


@contextmanager
def _recorded(results: list[Result], name: str) -> Iterator[list[str]]:
    """Record the outcome of the block as a result; any exception is a failure of the plugin.

    If there was nothing to try, the block appends the reason to the list.
    """
    untried: list[str] = []
    try:
        yield untried
    except EngineMissingError:  # says nothing about the plugin
        raise
    except (RunError, AssertionError) as cause:
        results.append(Result(name, False, str(cause)))
    except (Exception, SystemExit) as cause:
        check_engine(cause, "the conformance suite cannot run")
        results.append(Result(name, False, in_one_line(cause)))
    else:
        results.append(Result(name, True, "".join(untried)))


def _validated(plugin: Plugin, values: Mapping[Key, Value]) -> BaseModel:
    """The plugin's options from the values of its kind's section; a model gets a vocabulary size.

    Raises :class:`InputError` if a required option is missing or a given one is invalid.
    """
    section = section_of(plugin.kind)
    entries = {key[1:]: value for key, value in values.items() if key[0] == section}
    if plugin.kind == "model":
        entries.setdefault(("vocab_size",), Value(_VOCABULARY, DEFAULT))
    given = {key[0] for key in entries}
    fields = fields_of(plugin.options_model)
    missing = [f"{section}.{name}" for name, field in fields.items() if field.is_required() and name not in given]
    if missing:
        raise InputError(
            f"{plugin} cannot be tried without {', '.join(missing)}",
            why="these options have no default",
            fix=f"add {' '.join(f'--set {key}=...' for key in missing)}",
        )
    findings = Findings()
    options = validate(plugin.options_model, (section,), entries, findings)
    findings.settle()
    assert options is not None  # otherwise settle() has raised
    return options


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Put the sources of a project first on the import path, and drop its modules afterwards.

    No byte code is written: Python would reuse it for a file that is edited within a second and keeps its length.
    """
    root = folder.resolve()
    before, wrote = list(sys.path), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(root / source) for source in _SOURCES if (root / source).is_dir()]
    try:
        yield
    finally:
        sys.path[:] = before
        sys.dont_write_bytecode = wrote
        for name, module in list(sys.modules.items()):
            if root in Path(getattr(module, "__file__", None) or "/").parents:
                del sys.modules[name]
