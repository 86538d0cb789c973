"""Which file of each of CUDA's libraries torch uses, and which Transformer Engine, found out by importing both.

A child process imports them: a library that does not fit the others may end it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_run_cli.reports.probe import TIMEOUT_S


@dataclass(frozen=True)
class LibraryReport:
    """Files by library: ``torch``'s, and those ``with_engine``, of which more than one of a library is a fault.

    ``version`` is Transformer Engine's, empty where it is not installed; ``problem`` says why it cannot be imported.
    """

    torch: Mapping[str, Sequence[str]]
    with_engine: Mapping[str, Sequence[str]]
    version: str = ""
    problem: str = ""

    def several(self, library: str) -> bool:
        """Whether there are two of ``library`` in one process."""
        return len(self.with_engine.get(library, ())) > 1

    def line(self, library: str) -> str:
        """Who uses which file of ``library``."""
        torchs = self.torch.get(library, ())
        text = f"torch: {', '.join(torchs) or 'no file of its own'}"
        if self.problem or not self.version:
            return text
        others = [file for file in self.with_engine.get(library, ()) if file not in torchs]
        return f"{text}; Transformer Engine: {', '.join(others) or ('the same' if torchs else 'none')}"


def report_libraries(program: Sequence[str] = ("-m", __name__), timeout: float = TIMEOUT_S) -> LibraryReport:
    """Import torch, then Transformer Engine, and see what is loaded.

    Raises :class:`RuntimeError` if torch cannot be imported.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)}
    try:
        done = subprocess.run(
            (sys.executable, "-P", *program),
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"importing torch and Transformer Engine took longer than {timeout:g} s") from None
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not said:
        raise RuntimeError((done.stderr.strip().splitlines() or ["importing torch ended the process"])[-1])
    facts = {name: value for each in said for name, value in each.items()}
    ended = f"importing it ended the process with code {done.returncode}" if done.returncode else ""
    return LibraryReport(said[0]["loaded"], facts["loaded"], facts.get("version", ""), facts.get("problem", ended))


def _examine() -> None:
    """Print the files that torch has loaded, then those that Transformer Engine's import leaves, or why it fails."""
    from megatron_run_engine.runtime.cuda_libraries import led_to_loaded, loaded_files
    from megatron_run_engine.runtime.transformer_engine import import_led, installed_version

    import_module("torch")
    with led_to_loaded():
        _tell(loaded=loaded_files())
    if find_spec("transformer_engine") is None:
        return
    _tell(version=installed_version() or "of unknown version")
    try:
        import_led("transformer_engine.pytorch")
    except Exception as error:  # a library built for another machine may raise anything
        _tell(problem=" ".join(f"{type(error).__name__}: {error}".split()))
    else:
        _tell(loaded=loaded_files())


def _tell(**facts: Any) -> None:
    print(json.dumps(facts, default=str), flush=True)  # noqa: T201  # the answer to the parent


if __name__ == "__main__":
    _examine()
