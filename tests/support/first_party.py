"""Lists of first-party plugins, from the plugins' own metadata: `make docs` writes them where cog's marks stand.

A new plugin is its folder, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from textwrap import wrap

from megatron_run.config.fields import default_of
from megatron_run.contracts.plugin import COMMAND, KINDS, entry_point_group
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run.registry.loaded_command import load_command
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_engine.data.tokenizer import ByteTokenizer
from tests.support.checkout import ENGINE, KERNEL, MEMBERS, ROOT

#: Characters of a command's summary: more than a line of the help has room for.
_SUMMARY = 90
#: Characters of a line of the sources.
_WIDTH = 120
#: What a plugin of each kind decides.
DECIDES = {
    "scaler": "the loss scale",
    "optimizer": "data-parallel communication, sharding, the update",
    "schedule": "where layers live, in which order microbatches run",
    "parallel-layer": "linear, embedding, norm, attention, cross entropy",
    "graph-capture": "which segments of a layer are recorded and replayed, or compiled",
    "model": "the network",
    "data": "samples",
    "observer": "watches; any number of them",
    "format": "models of other programs, imported and exported",
}


@cache
def plugins() -> tuple[Plugin, ...]:
    """The first-party plugins by kind, those of the engine first, then by name."""
    ours = {member.name for member in MEMBERS}
    found = [load(entry, "a list of plugins") for entry in scan().entries if entry.distribution in ours]
    return tuple(sorted(found, key=lambda each: (list(KINDS).index(each.kind), not _built_in(each), each.name)))


def _built_in(plugin: Plugin) -> bool:
    return plugin.distribution in (KERNEL.name, ENGINE.name)


def _holder(plugin: Plugin) -> str:
    """The plugin of the same kind in whose distribution it lies; empty where it has one of its own."""
    holder = plugin.distribution.removeprefix(f"megatron-run-{plugin.kind}-")
    return "" if _built_in(plugin) or holder == plugin.name else holder


def sources() -> Iterator[str]:
    """For mypy's path: the folder of each member."""
    yield from (f'    "{member}/src",' for member in MEMBERS)


def known() -> Iterator[str]:
    """For the kernel: each plugin that may be missing beside it, with what it provides."""
    for each in plugins():
        if each.distribution == KERNEL.name:
            continue
        provides = ", ".join(f'"{ability}"' for ability in sorted(each.info.provides))
        more = f", frozenset({{{provides}}})" * bool(provides) + ", builtin=True" * _built_in(each)
        more += f', within="{_holder(each)}"' * bool(_holder(each))
        more += f", vocab_size={_vocabulary(each)}" * bool(_vocabulary(each))
        yield f'    Known("{each.kind}", "{each.name}"{more}),'


def suggestions() -> Iterator[str]:
    """For the kernel: what each plugin that may be missing suggests."""
    for each in plugins():
        if each.distribution != KERNEL.name and each.info.suggests:
            yield f'        "{each}": {json.dumps(dict(each.info.suggests))},'


def summaries() -> Iterator[str]:
    """For the kernel: what each plugin of the engine says of itself, and each distribution that may be missing."""
    for each in plugins():
        if not _built_in(each) or each.entry is None:
            continue
        said = (import_module(each.entry.value.partition(":")[0]).__doc__ or "").partition("\n")[0].partition(": ")[2]
        yield from _entry(f"{each.kind}={each.name}", f"{said[0].upper()}{said[1:]}")
    holding = {each.distribution for each in plugins() if not _built_in(each)}
    for member in MEMBERS:
        if member.name in holding:
            yield from _entry(member.name, member.project["description"])


def _entry(key: str, text: str) -> Iterator[str]:
    """An entry of a mapping, in as many lines as it takes."""
    line = f'        "{key}": "{text}",'
    if len(line) <= _WIDTH:
        yield line
        return
    parts = wrap(text, _WIDTH - len('            " "'))
    yield f'        "{key}": ('
    yield from (f'            "{part} "' for part in parts[:-1])
    yield from (f'            "{parts[-1]}"', "        ),")


def _vocabulary(plugin: Plugin) -> int:
    """The token ids that data has whose options say none; 0 for other plugins, and where files say it."""
    fields = plugin.options_model.model_fields if plugin.kind == "data" else {}
    if plugin.name in ("text", "instruct") and default_of(fields["tokenizer"]) == "bytes":  # others add tokens
        return ByteTokenizer.vocab_size
    return default_of(fields["vocab_size"]) or 0 if "vocab_size" in fields else 0


def known_commands() -> Iterator[str]:
    """For the kernel: each command that may be missing beside it, with its distribution, as the projects say."""
    found = {
        name: member.name
        for member in MEMBERS
        for name in member.project.get("entry-points", {}).get(entry_point_group(COMMAND), {})
    }
    yield from (f'        "{name}": "{found[name]}",' for name in sorted(found))


def command_summaries() -> Iterator[str]:
    """For the kernel: what each of these commands does, as the help shows it."""
    ours = {member.name for member in MEMBERS}
    for entry in sorted(scan(kind=COMMAND).commands, key=lambda each: each.name):
        if entry.distribution in ours:
            yield f'        "{entry.name}": "{load_command(entry).get_short_help_str(_SUMMARY)}",'


def table() -> Iterator[str]:
    """For the front page: a row for each kind."""
    yield from ("", "| kind | decides | built in | packages |", "|---|---|---|---|")
    for kind in KINDS:
        cells = [", ".join(map(_named, _of(kind, built_in))) for built_in in (True, False)]
        yield "| " + " | ".join([f"`{kind}`", DECIDES[kind], *cells]).replace("  ", " ") + " |"
    yield ""


def _of(kind: str, built_in: bool) -> list[Plugin]:
    return [each for each in plugins() if each.kind == kind and _built_in(each) is built_in and not _holder(each)]


def _named(plugin: Plugin) -> str:
    within = [f"`{each.name}`" for each in plugins() if each.kind == plugin.kind and _holder(each) == plugin.name]
    return f"`{plugin.name}`" + f" (with {', '.join(within)})" * bool(within)


def pages() -> Iterator[str]:
    """For the reference: of each kind the packages with options, linked to their pages."""
    yield ""
    for kind in KINDS:
        links = [
            f"[{each.name}](../plugins/{kind}/{each.name}/README.md)"
            for each in plugins()
            if each.kind == kind and each.options_model.model_fields and (ROOT / "plugins" / kind / each.name).is_dir()
        ]
        if links:
            yield f"- `{kind}`: {', '.join(links)}"
    yield ""
