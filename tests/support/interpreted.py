"""Runs a function in a process of its own where Triton's interpreter runs the kernels, on CPU tensors.

Triton decides when it is imported, and torch imports it with its compiler, so the process is a new one and not forked.
The interpreter of Triton 3.6 fails at loops with numpy 2.5; `make te` has both, and compiles the kernels only.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.checkout import ROOT

T = TypeVar("T")


def interpreted(function: Callable[..., T], *arguments: Any, timeout: float = 240) -> T:
    """The result of ``function`` there: it is importable, and its arguments and result can be pickled.

    Skips the test without Triton.
    """
    pytest.importorskip("triton")
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "given", Path(folder) / "found"
        given.write_bytes(pickle.dumps((function.__module__, function.__qualname__, arguments)))
        done = subprocess.run(
            [sys.executable, "-m", __name__, given, found],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,  # what it said is in the message
        )
        assert done.returncode == 0, done.stderr
        result: T = pickle.loads(found.read_bytes())
        return result


def _main(given: str, found: str) -> None:
    module, name, arguments = pickle.loads(Path(given).read_bytes())
    result = getattr(import_module(module), name)(*arguments)
    Path(found).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
