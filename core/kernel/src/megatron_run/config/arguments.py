"""The grammar of ``--plugin`` and ``--set`` and of their environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from megatron_run.config.faults import VARIABLE as FAULT_VARIABLE
from megatron_run.config.merge import SEPARATORS, ConfigSource, assign, plugin_words
from megatron_run.config.origin import Origin, Text, section_of
from megatron_run.config.problems import Findings
from megatron_run.config.request import ENVIRONMENT_PREFIX
from megatron_run.config.yaml import Node
from megatron_run.contracts.plugin import RUN_KINDS, check_run_kind
from megatron_run.errors import InputError, did_you_mean

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
        word, _, rest = name.partition(",")
        raise InputError(
            f"{rest!r} after {kind}={word} is no option",
            why="a comma starts an option only as OPT=VALUE",
            origin=str(origin),
            fix=f"write {kind}={word},OPT={rest}" + ("; stack with +" if SEPARATORS.get(kind) == "+" else ""),
        )


def plugin_name(word: str) -> str:
    """The bare name in NAME, DIST:NAME or ./file.py."""
    if word.endswith(".py"):
        return word.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    return word.rpartition(":")[2]
