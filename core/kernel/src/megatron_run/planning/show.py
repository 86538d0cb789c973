"""The resolved configuration as YAML: as a file that resolves to the same run, and with each key's origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_run.config.origin import DEFAULT, KIND_SECTIONS, Key, Origin
from megatron_run.config.yaml_text import flow, scalar

if TYPE_CHECKING:
    from megatron_run.planning.run import ResolvedRun


def to_yaml(run: ResolvedRun) -> str:
    """A configuration file that resolves to ``run``: every key with its value."""
    return yaml_text(sections(run))


def yaml_text(data: Mapping[str, Any]) -> str:
    """Sections of plain data as YAML that reads back as the same."""
    return "".join(f"{text}\n" for text, _ in _lines(data, ()))


def show(run: ResolvedRun) -> str:
    """The resolved configuration as YAML, each key with where it came from as a comment."""
    lines = [(text, None if key is None else _origin(run, key)) for text, key in _lines(sections(run), ())]
    width = max(len(text) for text, _ in lines)
    return "".join(f"{text:{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines)


def show_json(run: ResolvedRun) -> dict[str, Any]:
    """What :func:`show` says as data: dotted key -> value, origin and layer."""
    return {
        ".".join((KIND_SECTIONS.get(key[0], key[0]), *key[1:])): {
            "value": value,
            "origin": str(_origin(run, key)),
            "layer": _origin(run, key).layer,
        }
        for key, value in leaves(sections(run), ())
    }


def sections(run: ResolvedRun) -> dict[str, Any]:
    """The configuration as plain data, with the options of a kind beside its ``use`` as a user writes them."""
    data = run.config.model_dump(mode="json")
    for section in KIND_SECTIONS:
        if section in data:
            data[section] = {"use": data[section]["use"], **data[section]["options"]}
    return data


def leaves(data: Mapping[str, Any], prefix: Key) -> Iterator[tuple[Key, Any]]:
    """Every key of nested mappings with its value, in order; an empty mapping is a value."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def _origin(run: ResolvedRun, key: Key) -> Origin:
    """Where a key came from; an option of one of several plugins may have been written for all of them."""
    candidates = (key, (key[0], *key[2:])) if len(key) > 2 else (key,)
    known = [key[:end] for key in candidates for end in range(len(key), 1, -1)]
    return next((run.origins[each] for each in known if each in run.origins), DEFAULT)


def _lines(data: Mapping[str, Any], prefix: Key) -> Iterator[tuple[str, Key | None]]:
    """Lines of YAML, each with the key whose value it holds."""
    indent = "  " * len(prefix)
    for name, value in data.items():
        written = f"{indent}{scalar(KIND_SECTIONS.get(name, name) if not prefix else name)}:"
        if isinstance(value, Mapping) and value:
            yield written, None
            yield from _lines(value, (*prefix, name))
        else:
            yield f"{written} {flow(value)}", (*prefix, name)
