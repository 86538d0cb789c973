"""Checks a command that a package adds to ``megatron-run``. What it does is its author's to test."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_run.registry.commands import EXAMPLE, words_of
from megatron_run.registry.discover import Entry
from megatron_run.registry.loaded_command import load_command
from megatron_run_testing import Check, CheckFailed

#: Modules that take a shell's completion, or a list of commands, from an instant to a wait.
HEAVY = ("torch", "numpy", "pydantic", "rich", "transformers", "datasets")
_CHILD = """
import json, sys
from megatron_run.registry.discover import Entry
from megatron_run.registry.loaded_command import load_command
load_command(Entry(**json.loads(sys.argv[1])))
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""
#: Seconds in which a module must be imported.
_TIMEOUT = 60


def command_checks(entry: Entry) -> tuple[Check, ...]:
    """The checks of the command of ``entry``, and of what is in it where it is a group."""
    return (
        Check("its module imports nothing heavy", lambda: _is_light(entry)),
        Check("each command says in a line what it does", lambda: _is_explained(entry)),
        Check("each that needs words shows a command line that has them", lambda: _shows_examples(entry)),
    )


def _is_light(entry: Entry) -> None:
    path = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(asdict(entry)), *HEAVY],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=_TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise CheckFailed(f"importing {entry.value} failed: {done.stderr.strip().splitlines()[-1]}")
    if found := done.stdout.split():
        why = "it is imported when somebody asks which commands there are"
        raise CheckFailed(f"{entry.value} imports {', '.join(found)}: {why}; import them in the bodies of commands")


def _is_explained(entry: Entry) -> None:
    for typed, command in _each(entry):
        if not command.get_short_help_str():
            raise CheckFailed(f"{typed} has no help: write a docstring")


def _shows_examples(entry: Entry) -> str:
    asked = 0
    for typed, command in _each(entry):
        required = [each for each in command.params if each.required]
        if not required or hasattr(command, "commands"):
            continue
        asked += 1
        shown = " ".join((command.epilog or "").partition(EXAMPLE)[2].split())
        if not shown.startswith(f"{typed} "):
            line = f"{typed.partition(' ')[2]} ..."
            raise CheckFailed(f'{typed} needs {required[0].name} and has no example: add epilog=example("{line}")')
        context = command.context_class(command, info_name=typed, resilient_parsing=True)
        given, nothing = (
            command.make_parser(context).parse_args(words)[0] for words in (shlex.split(shown.removeprefix(typed)), [])
        )
        lacking = [each.name for each in required if given.get(each.name) == nothing.get(each.name)]
        if lacking:
            raise CheckFailed(f"the example of {typed} lacks {', '.join(lacking)}: {shown}")
    return "" if asked else "no command needs words"


def _each(entry: Entry) -> Iterator[tuple[str, Any]]:
    """The command of ``entry``, and all in it, each with what is typed for it."""
    waiting: list[tuple[str, Any]] = [(f"megatron-run {words_of(entry)}", load_command(entry))]
    while waiting:
        typed, command = waiting.pop()
        yield typed, command
        waiting += [(f"{typed} {name}", inner) for name, inner in getattr(command, "commands", {}).items()]
