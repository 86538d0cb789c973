"""Words that may be typed at each place: functions that click calls with a context, a parameter and the word so far.

A word of several parts, as ``schedule=interleaved,group_size=4``, is completed part by part. A file whose name a shell
would want quoted is left to whoever types it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from megatron_run.config.presets import presets
from megatron_run.config.run_home import run_and_step
from megatron_run.contracts.plugin import COMMAND, KINDS, RUN_KINDS, SEPARATORS
from megatron_run.files.latest_run import DEFAULT_RUN, follow_latest
from megatron_run.registry.discover import Catalog, scan
from megatron_run_cli.completion.vocabulary import KeyHelp, Vocabulary, learned

Items = list[CompletionItem[str]]
Completer = Callable[[click.Context, click.Parameter, str], Items]

_UNQUOTED = re.compile(r"[\w./+,=@%:-]*")
_STEP = re.compile(r"step([0-9]+)")
#: Files of ours that nobody names: locks, and what is being written.
_KEPT = re.compile(r".*\.(lock|lock-exclusive|tmp)")


def _items(candidates: Iterable[str] | Mapping[str, str], typed: str, before: str = "") -> Items:
    """The ``candidates``, of a mapping with meanings, that begin with ``typed``, each after what stands ``before``."""
    meanings = candidates if isinstance(candidates, Mapping) else dict.fromkeys(candidates, "")
    return [
        CompletionItem(f"{before}{candidate}", help=meaning or None)
        for candidate, meaning in meanings.items()
        if candidate.startswith(typed)
    ]


def one_of(*words: str) -> Completer:
    """A completer of ``words``."""
    return lambda _context, _parameter, typed: _items(words, typed)


#: What a package may offer; and the kinds of which a run chooses.
offered_kinds, run_kinds = one_of(*KINDS, COMMAND), one_of(*RUN_KINDS)


def any_path(_context: click.Context, _parameter: click.Parameter, typed: str) -> Items:
    """Files and folders, as the shell completes them."""
    return [CompletionItem(typed, type="file")]


def one_of_or_path(*words: str) -> Completer:
    """A completer of ``words``, and of files and folders."""
    return lambda _context, _parameter, typed: [*_items(words, typed), *_paths(typed)]


def config(_context: click.Context, _parameter: click.Parameter, typed: str) -> Items:
    """``preset:NAME``, or a file that can be a configuration."""
    named = {f"preset:{name}": meaning for name, meaning in presets().items()}
    return [*_items(named, typed), *_paths(typed, endings=(".yaml", ".yml", ".json"))]


def device(_context: click.Context, _parameter: click.Parameter, typed: str) -> Items:
    """A device that comes with the planner, or a file that describes one."""
    shipped = (
        [each.name for each in (files("megatron_run_planner") / "devices").iterdir()]
        if find_spec("megatron_run_planner")
        else []
    )
    names = sorted(name.removesuffix(".yaml") for name in shipped if name.endswith(".yaml"))
    return [*_items(names, typed), *_paths(typed, endings=(".yaml", ".yml"))]


def formats(_context: click.Context, _parameter: click.Parameter, typed: str) -> Items:
    """The installed formats."""
    return _names(scan(), "format", typed)


def plugin_name(_context: click.Context, _parameter: click.Parameter, typed: str) -> Items:
    """``KIND=NAME`` of an installed plugin."""
    kind, equals, name = typed.partition("=")
    if not equals:
        return _items((f"{each}=" for each in (*KINDS, COMMAND)), typed)
    return _names(scan(), kind, name, f"{kind}=")


def plugin_or_path(context: click.Context, parameter: click.Parameter, typed: str) -> Items:
    """``KIND=NAME``, or a folder or file with a plugin."""
    return [*plugin_name(context, parameter, typed), *_paths(typed)]


def plugin_choice(_context: click.Context, _parameter: click.Parameter, typed: str) -> Items:
    """``KIND=NAME[,OPT=VAL...]``: kinds, then installed names, then the options of the named ones and their values."""
    written, equals, rest = typed.partition("=")
    if not equals:
        return _items((f"{kind}=" for kind in RUN_KINDS), typed)
    kind, catalog = written.replace("_", "-"), scan()
    chosen, comma, option = rest.rpartition(",")
    if not comma:
        stack, plus, name = rest.rpartition("+") if SEPARATORS.get(kind) == "+" else ("", "", rest)
        return _names(catalog, kind, name, f"{written}={stack}{plus}")
    options = _options(learned(catalog), kind, re.split(r"[+,]", chosen))
    before = f"{written}={chosen},"
    name, equals, value = option.partition("=")
    if equals:
        return _values(name.replace("-", "_"), options, value, f"{before}{name}=")
    found = _items({f"{each}=": about.meaning for each, about in options.items()}, option, before)
    return [*found, *(_names(catalog, kind, option, before) if SEPARATORS.get(kind) == "," else [])]


def setting(context: click.Context, _parameter: click.Parameter, typed: str) -> Items:
    """``KEY=VALUE``: sections, then their keys, then values where a key takes few, files or plugins."""
    catalog = scan()
    name, equals, value = typed.partition("=")
    known = _keys(catalog, context, name)
    if equals:
        section, _, rest = name.partition(".")
        kind = section.replace("_", "-")
        if kind in RUN_KINDS and rest == "use":
            return _names(catalog, kind, value, f"{name}=")
        return _values(name, known, value, f"{name}=")
    if "." in typed:
        return _items({f"{each}=": about.meaning for each, about in known.items()}, typed)
    return _items((f"{section}." for section in _sections(known)), typed)


def key(context: click.Context, _parameter: click.Parameter, typed: str) -> Items:
    """A section or a key."""
    known = _keys(scan(), context, typed)
    if "." in typed:
        return _items({name: about.meaning for name, about in known.items()}, typed)
    return [each for section in _sections(known) for each in _items((section, f"{section}."), typed)]


def keys(context: click.Context, parameter: click.Parameter, typed: str) -> Items:
    """Sections and keys, separated by commas."""
    before, comma, last = typed.rpartition(",")
    return [CompletionItem(f"{before}{comma}{each.value}", help=each.help) for each in key(context, parameter, last)]


def task(_context: click.Context, _parameter: click.Parameter, typed: str) -> Items:
    """``NAME=FILE``, a task of an evaluation."""
    return _tasks(typed)


def finetune_task(_context: click.Context, _parameter: click.Parameter, typed: str) -> Items:
    """The tasks that the plugin ``data=nlu`` reads."""
    about = learned(scan()).options.get("data=nlu", {}).get("task")
    return _items(about.choices if about else (), typed)


def step(context: click.Context, _parameter: click.Parameter, typed: str) -> Items:
    """The steps in the folder that the line names, else in ``runs/latest`` where the command would take that."""
    folders = (
        *context.args,
        *([] if "model" in context.params else [str(DEFAULT_RUN)]),
    )  # no option's value ends the line
    return _items(_steps(Path(folders[0])) if folders else (), typed)


def resumed(context: click.Context, _parameter: click.Parameter, typed: str) -> Items:
    """``auto``, ``never``, and the steps in the run's folder where the line sets it."""
    folders = [text.removeprefix("run.folder=") for text in _given(context, "sets") if text.startswith("run.folder=")]
    return _items(("auto", "never", *(each for folder in folders for each in _steps(Path(folder)))), typed)


def _names(catalog: Catalog, kind: str, typed: str, before: str = "") -> Items:
    return _items(dict.fromkeys((entry.name for entry in catalog.of_kind(kind)), ""), typed, before)


def _given(context: click.Context, name: str) -> tuple[str, ...]:
    return tuple(context.params.get(name) or ())


def _options(vocabulary: Vocabulary, kind: str, names: Iterable[str]) -> dict[str, KeyHelp]:
    """The options of the plugins of ``kind`` that are called so; a name may say its distribution."""
    chosen = [vocabulary.options.get(f"{kind}={name.rpartition(':')[2]}", {}) for name in names]
    return {name: about for options in chosen for name, about in options.items()}


def _keys(catalog: Catalog, context: click.Context, typed: str) -> dict[str, KeyHelp]:
    """Every key of the kernel, and the options of the plugins that the line chooses; of kinds without, of all.

    The section is spelled as in ``typed``, the key as far as it is there: ``parallel_layer`` or ``parallel-layer``.
    """
    vocabulary = learned(catalog)
    lines = [text.partition("=")[::2] for text in _given(context, "plugins")]
    chosen = {kind.replace("_", "-"): re.split(r"[+,]", names) for kind, names in lines}
    found = dict(vocabulary.keys)
    for kind in RUN_KINDS:
        names = chosen.get(kind, [entry.name for entry in catalog.of_kind(kind)])
        section = kind.replace("-", "_") if "_" in typed.partition(".")[0] else kind
        found |= {f"{section}.{name}": about for name, about in _options(vocabulary, kind, names).items()}
        for name in names if kind in SEPARATORS else ():  # as `config show` writes those of one of several
            own = f"{section}.{name.rpartition(':')[2]}."
            if typed.startswith(own):
                found |= {f"{own}{option}": about for option, about in _options(vocabulary, kind, [name]).items()}
    return found


def _sections(known: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in known if "." in name))


def _values(name: str, known: Mapping[str, KeyHelp], typed: str, before: str) -> Items:
    """Values of the key or option ``name``, as far as they can be listed."""
    about = known.get(name)
    if about is None:
        return []
    if "list" in about.type:
        first, comma, typed = typed.rpartition(",")
        before = f"{before}{first}{comma}"
    if name == "run.branch_from":
        return _run_at_step(typed, before)
    if name == "eval.tasks":
        return _tasks(typed, before)
    return [*_items(about.choices, typed, before), *(_paths(typed, before) if about.files else [])]


def _tasks(typed: str, before: str = "") -> Items:
    from megatron_run.contracts.schema import TASKS

    name, equals, source = typed.partition("=")
    if not equals:
        return _items((f"{each}=" for each in TASKS), typed, before)
    before = f"{before}{name}="
    return [*_items(("validation",) if name == "perplexity" else (), source, before), *_paths(source, before)]


def _run_at_step(typed: str, before: str) -> Items:
    """``RUN@STEP``: a folder, and then the steps that are saved there."""
    run, step = run_and_step(typed)
    if step:
        return _items(_steps(Path(run)), step[1:], f"{before}{run}@")
    return [*_items((f"{typed}@",) if typed and _steps(Path(typed)) else (), typed, before), *_paths(typed, before)]


def _steps(folder: Path) -> list[str]:
    """The numbers of the steps that are saved in a run folder or in its checkpoints, the newest first.

    ``runs/latest`` is followed to the run that it names.
    """
    run = follow_latest(folder.expanduser())
    for place in (run / "checkpoints", run):
        if place.is_dir():
            found = [match[1] for match in (_STEP.fullmatch(each.name) for each in place.iterdir()) if match]
            return sorted(found, key=int, reverse=True)
    return []


def _paths(typed: str, before: str = "", endings: tuple[str, ...] = ("",)) -> Items:
    """Folders, and files with one of the ``endings``, whose paths begin with ``typed``."""
    folder, slash, start = typed.rpartition("/")
    try:
        entries = sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())
    except (OSError, RuntimeError):  # none such, or nobody's home
        return []
    own = (each for each in entries if not _KEPT.fullmatch(each.name))
    shown = [each for each in own if _UNQUOTED.fullmatch(each.name) and (start or not each.name.startswith("."))]
    names = [f"{each.name}/" if each.is_dir() else each.name for each in shown]
    return _items((each for each in names if each.endswith(("/", *endings))), start, f"{before}{folder}{slash}")
