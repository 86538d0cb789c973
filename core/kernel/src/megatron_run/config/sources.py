"""Where a configuration comes from: default plugins, files, environment variables, ``--plugin`` and ``--set``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_run.config.faults import VARIABLE as FAULT_VARIABLE
from megatron_run.config.merge import ConfigSource, assign, merge, plugin_words, source_from
from megatron_run.config.origin import DEFAULT, Choice, Key, Origin, Text, dotted, section_of
from megatron_run.config.presets import read_preset
from megatron_run.config.request import ENVIRONMENT_PREFIX, Found, Request
from megatron_run.config.run_home import follow_moved_weights, name_runs
from megatron_run.config.yaml import MAX_BYTES, Node, parse, too_large
from megatron_run.contracts.plugin import RUN_KINDS, SEPARATORS, check_run_kind
from megatron_run.errors import Findings, InputError
from megatron_run.errors.wording import did_you_mean, near_path
from megatron_run.files.foreign_file import open_file
from megatron_run.files.latest_run import follow_latest

#: The default of each kind. Data has none: training on data that nobody named would be a silent mistake.
DEFAULT_PLUGINS: Mapping[str, tuple[str, ...]] = {
    "scaler": ("none",),
    "optimizer": ("adamw",),
    "schedule": ("sequential",),
    "parallel-layer": ("dense",),
    "graph-capture": ("none",),
    "model": ("gpt",),
    "observer": ("console", "jsonl", "tensorboard"),
}


@dataclass(frozen=True)
class Rule:
    """The default is ``plugin`` where ``key`` is set: to ``value``, or to anything when that is None."""

    plugin: str
    key: Key
    value: str | None = None

    def __str__(self) -> str:
        """The condition as the user would type it."""
        return dotted(self.key) + (f"={self.value}" if self.value else "")

    def holds(self, source: ConfigSource) -> bool:
        """Whether the merged ``source`` meets the condition."""
        given = source.values.get(self.key)
        return given is not None and self.value in (None, given.data)


#: Conditional defaults of a kind; the first rule that holds wins.
RULES: Mapping[str, tuple[Rule, ...]] = {
    "scaler": (
        Rule("constant", ("scaler", "loss_scale")),
        Rule("dynamic", ("train", "precision"), "fp16"),  # its gradients vanish without a loss scale
    ),
}


def default_source() -> ConfigSource:
    """The weakest source: the default plugins."""
    source = ConfigSource()
    for kind, words in DEFAULT_PLUGINS.items():
        source.choose(kind, words, DEFAULT)
    return source


def follow_rules(source: ConfigSource) -> None:
    """Apply the rules to kinds of which the user chose no plugin; changes the merged ``source`` in place."""
    for kind, rules in RULES.items():
        rule = next((rule for rule in rules if rule.holds(source)), None)
        if rule and all(choice.origin == DEFAULT for choice in source.choices.get(kind, ())):
            source.choices[kind] = (Choice(rule.plugin, Origin("default", f"the default with {rule}")),)


DEFAULT_PRESET = "preset:laptop"
_PRESET = "preset:"
_STDIN = "-"


def read_sources(
    request: Request, findings: Findings, notices: list[str], latest: MutableMapping[str, str] | None = None
) -> ConfigSource:
    """Merge every source of ``request``, defaults included, suggestions of plugins not. Errors enter ``findings``.

    Where the user chose no plugin of a kind, a rule over other keys may choose it. What ``runs/latest`` stands for
    enters ``latest``, which begins as that of ``request``.

    Raises :class:`~megatron_run.errors.Problems` at once when a CONFIG cannot be read: further errors would only
    follow from the missing file.
    """
    latest = {} if latest is None else latest
    latest.update(request.latest)
    sources = [default_source()]
    configs = request.configs or (DEFAULT_PRESET,)
    for config in configs:
        with findings.collect():
            sources.append(source_from(_read(config, request.stdin, latest), findings))
    unread = len(sources) <= len(configs)
    sources.append(environment_source(request.environment, findings, notices))
    sources.append(command_line_source(request.sets, request.plugins, findings))
    sources.append(_values_source({**request.values, **request.planned}, findings))
    if unread:
        findings.settle()
    merged = merge(sources)
    follow_rules(merged)
    name_runs(merged, latest)
    follow_moved_weights(merged, notices)
    return merged


def _read(config: str | Mapping[str, Any], stdin: str | None, latest: MutableMapping[str, str]) -> dict[str, Node]:
    if isinstance(config, Found):
        return _nodes(config, Origin("found", config.place))
    if not isinstance(config, str):
        return _nodes(config, Origin("python", "the configuration given from Python"))
    if config == _STDIN:
        if stdin is None:
            raise InputError("the configuration - is standard input, which was not read")
        return parse(stdin, "standard input")
    if config.startswith(_PRESET):
        return parse(read_preset(config.removeprefix(_PRESET)), config)
    path = Path(config).expanduser()
    lies = follow_latest(path, latest)
    return parse(_file(lies), config if lies == path else str(lies))


def _file(path: Path) -> str:
    try:
        with open_file(path) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        inside = path / "config.yaml"  # of a run folder
        fix = f"name {inside}" if inside.is_file() else near_path(path)
        raise InputError(
            f"the configuration {path} cannot be read", why=error.strerror or str(error), fix=fix
        ) from None
    if len(content) > MAX_BYTES:
        raise too_large(str(path), path.stat().st_size)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise InputError(f"{path}:{line}:{column}: a byte that is not UTF-8 is refused") from None


def configuration_files(request: Request) -> list[Path]:
    """The files among the configurations of ``request``."""
    named = (each for each in request.configs if isinstance(each, str) and each != _STDIN)
    return [follow_latest(Path(each).expanduser()) for each in named if not each.startswith(_PRESET)]


def _values_source(values: Mapping[str, Any], findings: Findings) -> ConfigSource:
    source = ConfigSource()
    for key, data in values.items():
        origin = Origin("python", f"set {key}")
        with findings.collect():
            # A text is read by the type of its key, as after --set: "20" is a number of steps.
            assign(source, tuple(key.split(".")), _node(Text(data) if isinstance(data, str) else data, origin))
    return source


def _nodes(data: Mapping[str, Any], origin: Origin) -> dict[str, Node]:
    return {str(key): _node(each, origin) for key, each in data.items()}


def _node(data: Any, origin: Origin) -> Node:
    return Node(_nodes(data, origin) if isinstance(data, Mapping) else data, origin)


#: A comma starts an option only where ``name=`` follows, so that lists need no quotes.
_OPTION = re.compile(r",(?=[A-Za-z_][A-Za-z0-9_.-]*=)")
_PLUGIN_VARIABLE = f"{ENVIRONMENT_PREFIX}PLUGIN_"
_SET_VARIABLE = f"{ENVIRONMENT_PREFIX}SET"


def command_line_source(sets: Iterable[str], plugins: Iterable[str], findings: Findings) -> ConfigSource:
    """The source of ``--set KEY=VALUE`` and ``--plugin KIND=NAME[,OPT=VAL...]``."""
    source = ConfigSource()
    for text in sets:
        with findings.collect():
            _set(source, text, "--set", Origin("command line", f"--set {text.partition('=')[0]}"))
    for text in plugins:
        with findings.collect():
            origin = Origin("command line", f"--plugin {text}")
            kind, equals, rest = text.partition("=")
            if not equals or not rest:
                raise InputError(f"--plugin {text} names no plugin", fix="write --plugin KIND=NAME, as schedule=1f1b")
            _plugin(source, check_run_kind(kind, str(origin)), rest, origin)
    return source


def environment_source(environment: Mapping[str, str], findings: Findings, notices: list[str]) -> ConfigSource:
    """The source of ``MEGATRON_RUN_PLUGIN_<KIND>`` and ``MEGATRON_RUN_SET``.

    Any other variable with our prefix gets a notice, except the one that injects faults, which configures nothing.
    """
    source = ConfigSource()
    variables = {f"{_PLUGIN_VARIABLE}{section_of(kind).upper()}": kind for kind in RUN_KINDS}
    for name, text in sorted(environment.items()):
        origin = Origin("environment", f"environment {name}")
        if name in variables:
            with findings.collect():
                _plugin(source, variables[name], text, origin)
        elif name == _SET_VARIABLE:
            for part in filter(None, (each.strip() for each in text.split(";"))):
                with findings.collect():
                    _set(source, part, str(origin), origin)
        elif name.startswith(ENVIRONMENT_PREFIX) and name != FAULT_VARIABLE:
            hint = did_you_mean(name, (*variables, _SET_VARIABLE, FAULT_VARIABLE))
            notices.append(f"the environment variable {name} means nothing here{'; ' + hint if hint else ''}")
    return source


def _set(source: ConfigSource, text: str, where: str, origin: Origin) -> None:
    key, equals, value = text.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or not all(parts):
        raise InputError(f"{text!r} is no KEY=VALUE", origin=where, fix="write as train.lr=1e-4")
    assign(source, parts, Node(Text(value), origin))


def _plugin(source: ConfigSource, kind: str, text: str, origin: Origin) -> None:
    """Choose the plugin of ``NAME[,OPT=VAL...]`` and set its options."""
    name, *options = _OPTION.split(text)
    _check_name(kind, name, origin)
    words = plugin_words(kind, name, origin)
    source.choose(kind, words, origin, add=kind == "observer")
    owner = (plugin_name(words[0]),) if kind == "observer" and len(words) == 1 else ()
    for option in options:
        key, _, value = option.partition("=")
        if value.startswith("[") and value.endswith("]"):
            raise InputError(
                f"{key}={value} is written in brackets, which shells take for a pattern",
                origin=str(origin),
                fix=f"write {key}={value[1:-1]}",
            )
        source.put((section_of(kind), *owner, *key.replace("-", "_").split(".")), Text(value), origin)


def _check_name(kind: str, name: str, origin: Origin) -> None:
    """Raise :class:`InputError` unless ``name`` can be the name of a plugin, or of several where the kind allows it."""
    if "=" in name or not name.strip():
        raise InputError(f"{name!r} is not the name of a {kind}", origin=str(origin), fix=f"write {kind}=NAME")
    if "," in name and SEPARATORS.get(kind) != ",":
        plugin, _, rest = name.partition(",")
        raise InputError(
            f"{rest!r} after {kind}={plugin} is no option",
            why="a comma starts an option only as OPT=VALUE",
            origin=str(origin),
            fix=f"write {kind}={plugin},OPT={rest}" + ("; stack with +" if SEPARATORS.get(kind) == "+" else ""),
        )


def plugin_name(reference: str) -> str:
    """The bare name in NAME, DIST:NAME or ./file.py."""
    if reference.endswith(".py"):
        return reference.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    return reference.rpartition(":")[2]
