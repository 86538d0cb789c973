"""The card of a saved step whose model is published: data, steps, losses, versions.

Only numbers, and names from a list, are said: no path, no host, no user, no command, no variable of the environment. Of
files it is their last names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from megatron_run.config.values import nested
from megatron_run.config.yaml import bare, parse
from megatron_run.contracts.format import Card
from megatron_run.errors import RunError
from megatron_run.files.safe_folder import SafeFolder
from megatron_run_engine.checkpoint.step_folder import find_step
from megatron_run_engine.run_folder.folder import last_config

if TYPE_CHECKING:
    from megatron_run_engine.checkpoint.manifest import About
    from megatron_run_engine.checkpoint.step_folder import Checkpoints

#: Keys of ``train`` that are said, in this order.
_TRAIN = ("global_batch_size", "sequence_length", "lr", "lr_shape", "precision", "seed")
#: Files that are named; more are counted.
_FILES = 5
#: Digits of a loss.
_LOSS = ".4f"


def model_card(checkpoints: Checkpoints, step: int, parameters: int) -> Card:
    """The card of a saved step with so many ``parameters``, and the model from whose weights it came."""
    about, home = checkpoints.manifest(step).about, checkpoints.path.parent
    rows = [("", ""), ("---", "---"), *_rows(about, home, parameters)]
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows)
    versions = ", ".join(f"{name} {version}" for name, version in sorted(about.versions.items()))
    text = f"A language model trained with megatron-run.\n\n{table}\n\nVersions: {versions}.\n"
    return Card(text, _origin(about, home))


def _rows(about: About, home: Path, parameters: int) -> Iterator[tuple[str, str]]:
    sections = nested(about.identity)
    train = sections.get("train", {})
    yield "model", f"{sections.get('model', {}).get('use', 'gpt')}, {parameters:,} parameters"
    yield "step", f"{about.step:,}" + (f" of {train['steps']:,}" if isinstance(train.get("steps"), int) else "")
    if samples := about.counters.get("samples"):
        yield "samples seen", f"{samples:,}"
    yield from (("data", each) for each in filter(None, [_data(sections.get("data", {}))]))
    if about.losses:
        yield "training loss", f"{about.losses[-1]:{_LOSS}}"
    yield from _evaluated(home, about.step)
    yield from ((f"train.{key}", str(train[key])) for key in _TRAIN if train.get(key) is not None)
    plugins = (f"{kind}={'+'.join(each.name for each in about.plugins[kind])}" for kind in about.plugins)
    yield "plugins", ", ".join(plugins) or "none"


def _data(section: Mapping[str, Any]) -> str:
    """The plugin and the last names of its files."""
    paths = section.get("paths") or ()
    names = [PurePath(str(path)).name for path in (paths if isinstance(paths, list | tuple) else [paths])]
    more = f" and {len(names) - _FILES} more" if len(names) > _FILES else ""
    return ": ".join(filter(None, (str(section.get("use", "")), ", ".join(names[:_FILES]) + more)))


def _evaluated(home: Path, step: int) -> Iterator[tuple[str, str]]:
    """The losses of the evaluations at ``step``, the last of each split; a run may have none, and an import no file."""
    content = None
    with suppress(OSError):
        content = SafeFolder(home).read("eval.jsonl")
    found: dict[str, float] = {}
    for line in (content or b"").split(b"\n"):
        with suppress(ValueError, TypeError, KeyError):
            each = json.loads(line)
            if each["step"] == step:
                found[str(each["split"])] = float(each["loss"])
    yield from ((f"{split} loss", f"{loss:{_LOSS}}") for split, loss in found.items())


def _origin(about: About, home: Path) -> str:
    """The path of what the weights began with, as its import has recorded it; empty where nothing tells."""
    if about.source:
        return about.source
    config = last_config(home)
    section = None if config is None else parse(config.text, str(config.path)).get("run")
    run = None if section is None else bare(section)
    begun = run.get("init_from") if isinstance(run, dict) else None
    with suppress(RunError, OSError):
        if isinstance(begun, str):
            checkpoints, step = find_step(Path(begun).expanduser())
            return checkpoints.manifest(step).about.source
    return ""


def _cell(value: str) -> str:
    """``value`` as a cell of a table of Markdown, where somebody else may have named a file."""
    return " ".join(value.split()).replace("|", "\\|").replace("<", "&lt;")
