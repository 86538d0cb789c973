"""Where configuration comes from: CONFIG words (files, presets, standard input, mappings) and all sources in order."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron_run.config.arguments import command_line_source, environment_source
from megatron_run.config.defaults import default_source, follow_rules
from megatron_run.config.merge import ConfigSource, assign, merge, source_from
from megatron_run.config.origin import Origin
from megatron_run.config.problems import Findings
from megatron_run.config.request import Request
from megatron_run.config.yaml import MAX_BYTES, Node, parse, too_large
from megatron_run.errors import InputError, did_you_mean

DEFAULT_PRESET = "preset:laptop"
_PRESET = "preset:"
_STDIN = "-"


def read_sources(request: Request, findings: Findings, notices: list[str]) -> ConfigSource:
    """Merge every source of ``request``, defaults included, suggestions of plugins not. Errors enter ``findings``.

    Where the user chose no plugin of a kind, a rule over other keys may choose it.

    Raises :class:`~megatron_run.errors.Problems` at once when a CONFIG cannot be read: further errors would only
    follow from the missing file.
    """
    sources = [default_source()]
    configs = request.configs or (DEFAULT_PRESET,)
    for config in configs:
        with findings.collect():
            sources.append(source_from(_read(config, request.stdin), findings))
    unread = len(sources) <= len(configs)
    sources.append(environment_source(request.environment, findings, notices))
    sources.append(command_line_source(request.sets, request.plugins, findings))
    sources.append(_values_source(request.values, findings))
    if unread:
        findings.settle()
    merged = merge(sources)
    follow_rules(merged)
    return merged


def presets() -> dict[str, str]:
    """The presets that come with the kernel: name -> the first line of its comment."""
    folder = files("megatron_run") / "presets"
    found = (entry for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return {
        entry.name.removesuffix(".yaml"): entry.read_text("utf-8").partition("\n")[0].lstrip("# ")
        for entry in sorted(found, key=lambda entry: entry.name)
    }


def _read(config: str | Mapping[str, Any], stdin: str | None) -> dict[str, Node]:
    if not isinstance(config, str):
        return _nodes(config, Origin("python", "the configuration given from Python"))
    if config == _STDIN:
        if stdin is None:
            raise InputError("the configuration - is standard input, which was not read")
        return parse(stdin, "standard input")
    if config.startswith(_PRESET):
        return parse(_preset(config.removeprefix(_PRESET)), config)
    return parse(_file(Path(config).expanduser()), config)


def _preset(name: str) -> str:
    known = presets()
    if name not in known:
        raise InputError(
            f"there is no preset {name!r}",
            fix=did_you_mean(name, known) or f"the presets are {', '.join(known)}",
        )
    return (files("megatron_run") / "presets" / f"{name}.yaml").read_text("utf-8")


def _file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"the configuration {path} cannot be read", why=error.strerror or str(error)) from None
    if len(content) > MAX_BYTES:
        raise too_large(str(path), path.stat().st_size)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise InputError(f"{path}:{line}:{column}: a byte that is not UTF-8 is refused") from None


def _values_source(values: Mapping[str, Any], findings: Findings) -> ConfigSource:
    source = ConfigSource()
    for key, data in values.items():
        origin = Origin("python", f"set {key}")
        with findings.collect():
            assign(source, tuple(key.split(".")), _node(data, origin))
    return source


def _nodes(data: Mapping[str, Any], origin: Origin) -> dict[str, Node]:
    return {str(key): _node(each, origin) for key, each in data.items()}


def _node(data: Any, origin: Origin) -> Node:
    return Node(_nodes(data, origin) if isinstance(data, Mapping) else data, origin)
