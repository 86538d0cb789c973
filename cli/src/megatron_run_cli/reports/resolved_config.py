"""``config show``: the resolved configuration, each key with where its value came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_run.config.origin import DEFAULT, Key, Origin, dotted
from megatron_run.config.yaml_text import yaml_lines
from megatron_run.planning.run import leaves, sections

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun


def show(run: ResolvedRun) -> str:
    """The resolved configuration as YAML, each key with its origin as a comment."""
    lines = [(text, None if key is None else _origin(run, key)) for text, key in yaml_lines(sections(run))]
    width = max(len(text) for text, _ in lines)
    return "".join(f"{text:{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines)


def show_json(run: ResolvedRun) -> dict[str, Any]:
    """What :func:`show` says as data: dotted key -> value, origin and layer."""
    found: dict[str, Any] = {}
    for key, value in leaves(sections(run)):
        origin = _origin(run, key)
        found[dotted(key)] = {"value": value, "origin": str(origin), "layer": origin.source}
    return found


def _origin(run: ResolvedRun, key: Key) -> Origin:
    """Where a key came from; an option of one of several plugins may have been written for all of them."""
    candidates = (key, (key[0], *key[2:])) if len(key) > 2 else (key,)
    known = [key[:end] for key in candidates for end in range(len(key), 1, -1)]
    return next((run.origins[each] for each in known if each in run.origins), DEFAULT)
