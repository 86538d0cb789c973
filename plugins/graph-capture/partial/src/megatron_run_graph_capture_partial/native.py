"""The executor in C++: one call from Python per replay, compiled at first use and kept for this user.

One process of a machine compiles, in a private folder that it renames into place, and the others wait for its lock,
which the kernel lifts when the process is killed. For torch's own lock, a file, the next run would wait for ever.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch

from megatron_run.files.publishing import publishing_folder
from megatron_run.files.user_cache import locked, user_cache
from megatron_run_graph_capture_partial.tape import Executor, Operation, call_of, in_python

if TYPE_CHECKING:
    import logging

_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
_SOURCE = Path(__file__).with_name("native.cpp")
#: Seconds between two heartbeats of a rank that compiles or waits, and after which a compiler is taken to hang.
_BEAT, _LONGEST = 1.0, 900.0


def build(log: logging.Logger, heartbeat: Callable[[], None]) -> Executor:
    """Find the extension, or compile it, and return the executor. Raises whatever the compiler raises.

    ``heartbeat`` is called by another thread meanwhile: compiling takes a minute, and is no hang of this rank.
    """
    home = _home()
    if not home.is_dir():
        log.warning("compiling the native executor of tapes, about a minute, for every later run: %s", home)
        with _beating(heartbeat):
            _compile(home)
    module = _load(home)

    def native(operations: Sequence[Operation]) -> Callable[[], None]:
        if any(operation.func.namespace == "c10d" for operation in operations):
            return in_python(operations)  # the native loop cannot wait for a collective
        tape = module.Tape()
        for operation in operations:
            call = call_of(operation)
            schema = call.func._schema
            tape.add(schema.name, schema.overload_name, call.args, call.kwargs, list(call.copies))
        replay: Callable[[], None] = tape.replay
        return replay

    return native


def _home() -> Path:
    """The folder of the extension compiled for this source, interpreter and torch, in the user's cache.

    Raises :class:`PermissionError` if anybody else could put a library there, which would be executed.
    """
    made_of = (_SOURCE.read_text(encoding="utf-8"), torch.__version__, sysconfig.get_config_var("EXT_SUFFIX"))
    return user_cache("tapes") / sha256(repr(made_of).encode()).hexdigest()[:16]


@cache
def _load(home: Path) -> Any:
    (library,) = home.glob("*.so")
    spec = spec_from_file_location(library.stem, library)
    assert spec is not None
    assert spec.loader is not None  # files that end in .so have a loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(home: Path) -> None:
    """Compile the extension and keep it at ``home``, unless another process does so first."""
    with locked(home.with_suffix(".lock")):
        if home.is_dir():
            return
        with suppress(FileExistsError), publishing_folder(home) as folder:  # without locks another may be first
            _call_compiler(folder / "megatron_run_tape.so")


def _call_compiler(library: Path) -> None:
    """Make ``library`` of the source. Raises :class:`RuntimeError` with what the compiler said.

    ``torch.utils.cpp_extension.load`` calls it through ninja, which gives it a process group of its own: there it would
    outlive this rank, which is ended with its group.
    """
    from torch.utils.cpp_extension import include_paths, library_paths

    headers = [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    defined = [f"-DTORCH_EXTENSION_NAME={library.stem}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    linked = [*(f"-L{path}" for path in library_paths()), *(f"-l{name}" for name in _LIBRARIES)]
    late = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []  # Python's own symbols
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    words = [*compiler, "-shared", "-fPIC", "-O2", "-std=c++20", *defined, *headers, str(_SOURCE), "-o", str(library)]
    done = subprocess.run([*words, *linked, *late], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(compiler)} ended with {done.returncode}: {done.stderr.strip()}")


@contextmanager
def _beating(heartbeat: Callable[[], None]) -> Iterator[None]:
    """Call ``heartbeat`` within the block, so that the time limit for a rank does not run."""
    ended = Event()

    def beat() -> None:
        for _ in range(int(_LONGEST / _BEAT)):
            heartbeat()
            if ended.wait(_BEAT):
                return

    thread = Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
