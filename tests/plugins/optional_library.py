"""Plugins whose library is optional: what they answer and import without it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_run.registry.discover import Entry, SourceDigests
from megatron_run_cli.reports import probe
from tests.support.forked import forked_command


def answer_here(entries: Sequence[Entry], timeout: float, refusals: bool) -> tuple[list[dict[str, Any]], str]:
    """What a child process would answer of plugins, for which it would import torch anew."""
    return [json.loads(json.dumps(probe._answer(entry, SourceDigests(), refusals))) for entry in entries], ""


def check_import(plugin: str, library: str, folder: Path) -> None:
    """Importing the package ``plugin`` does not import ``library``, in a process that has imported neither."""
    (folder / "importing.py").write_text(
        "import sys\n\n\ndef program():\n"
        f"    assert not {{'{library}', '{plugin}'}} & set(sys.modules)\n"
        f"    import {plugin}\n\n"
        f"    assert '{library}' not in sys.modules\n"
    )
    done = forked_command((), folder, program="importing:program")
    assert done.returncode == 0, done.stderr


def skip_without(library: str) -> None:
    """Skip the test where ``library`` is not installed. Its plugin imports it, as in a run, where it is."""
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")
