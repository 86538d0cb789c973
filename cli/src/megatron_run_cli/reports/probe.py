"""Importing plugins where they can do no harm: in a child process, which may die of it.

The child reads as JSON from its standard input whether refusals are asked, then entries, and answers one line of JSON
for each entry, in order. Whatever the
plugins print goes to the error stream, which nobody reads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.contracts.plugin import COMMAND
from megatron_run.errors import EngineMissingError, RunError
from megatron_run.registry.discover import Entry, SourceDigests

if TYPE_CHECKING:
    from megatron_run.registry.loaded_plugin import Plugin

#: Seconds in which a child must have answered for all its plugins.
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Probe:
    """The outcome for one entry: a description (the fields of :class:`Description`), or the error that it met.

    ``refusal`` is why the plugin, as its defaults are, can run on no device of this machine; empty where it can, and
    where that was not asked.
    """

    entry: Entry
    description: dict[str, Any] | None
    error: str
    refusal: str = ""


def probe(entries: Sequence[Entry], timeout: float = TIMEOUT_S, *, refusals: bool = True) -> tuple[Probe, ...]:
    """Import every entry in a child process and report each. One that kills the child costs the others nothing.

    For ``refusals`` plugins import the libraries that they need to run: seconds more than for what they say.
    """
    probes: list[Probe] = []
    while len(probes) < len(entries):
        waiting = entries[len(probes) :]
        answers, end = _ask_child(waiting, timeout, refusals)
        probes += [
            Probe(entry, answer.get("description"), answer.get("error", ""), answer.get("refusal", ""))
            for entry, answer in zip(waiting, answers, strict=False)
        ]
        if len(answers) < len(waiting):
            probes.append(Probe(waiting[len(answers)], None, f"importing it {end}"))
    return tuple(probes)


def _ask_child(entries: Sequence[Entry], timeout: float, refusals: bool) -> tuple[list[dict[str, Any]], str]:
    """The child's answers, which end early when a plugin ends the child, and how it ended."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "megatron_run_cli.reports.probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)},
    )
    try:
        output, _ = child.communicate(json.dumps([refusals, *(asdict(entry) for entry in entries)]), timeout)
        end = f"ended the process with code {child.returncode}"
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
        end = f"took longer than {timeout:g} s"
    return [json.loads(line) for line in output.splitlines()], end


def _answer(entry: Entry, digests: SourceDigests, refusals: bool) -> dict[str, Any]:
    from megatron_run.registry.load import load
    from megatron_run.registry.loaded_command import load_command
    from megatron_run_cli.reports.keys import describe

    try:
        if entry.kind == COMMAND:
            load_command(entry)
            return {}
        plugin = load(entry, "probe", digests)
        return {"description": asdict(describe(plugin)), "refusal": _refusal(plugin) if refusals else ""}
    except EngineMissingError as error:
        return {"error": f"{error.why}; {error.fix}"}
    except RunError as error:
        return {"error": error.why or error.what}


def _refusal(plugin: Plugin) -> str:
    """Why ``plugin`` runs on no device here. Asking for a GPU where there is none names a library."""
    if plugin.info.check_device is None:
        return ""
    refusal = ""
    for device in ("cpu", "cuda:0"):
        try:
            plugin.check_device(device)
        except RunError as error:
            refusal = f"{error.what}{f': {error.why}' if error.why else ''}{f'; {error.fix}' if error.fix else ''}"
        else:
            return ""
    return refusal


def _serve() -> None:
    """The child's side."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what plugins print must not mix with the answers
    digests = SourceDigests()
    refusals, *entries = json.load(sys.stdin)
    for fields in entries:
        answers.write(json.dumps(_answer(Entry(**fields), digests, refusals)) + "\n")
        answers.flush()
    os._exit(0)  # without waiting for threads that plugins may have left


if __name__ == "__main__":
    _serve()
