"""The executor in C++: one call from Python per replay, compiled at first use and kept.

Each process compiles in a private folder and renames it into place atomically. In a shared folder torch makes others
wait for a lock file that the compiling process removes at the end: if that process is killed, they wait for ever.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from megatron_run_graph_capture_partial.executors import call_of, in_python
from megatron_run_graph_capture_partial.tape import Executor, Operation

_SOURCE = Path(__file__).with_name("native.cpp")


def build() -> Executor:
    """Compile the extension, or find it compiled, and return the executor. Raises whatever the compiler raises."""
    module = _module()

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


@cache
def _module() -> Any:
    home = _home()
    return _load(home) if home.is_dir() else _compile(home)


def _home() -> Path:
    """The folder of the extension compiled for this source, interpreter and torch, beside torch's own extensions."""
    from torch.utils.cpp_extension import get_default_build_root

    made_of = (_SOURCE.read_text(encoding="utf-8"), torch.__version__, sysconfig.get_config_var("EXT_SUFFIX"))
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    return Path(root) / f"megatron_run_tape-{sha256(repr(made_of).encode()).hexdigest()[:16]}"


def _load(home: Path) -> Any:
    (library,) = home.glob("*.so")
    spec = spec_from_file_location(library.stem, library)
    assert spec is not None
    assert spec.loader is not None  # files that end in .so have a loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(home: Path) -> Any:
    """Compile and load the extension, and keep it at ``home``. Concurrent ranks do not wait for each other."""
    from torch.utils.cpp_extension import load

    home.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{home.name}.", dir=home.parent) as private:
        folder = Path(private) / "build"
        folder.mkdir()
        module = load(
            "megatron_run_tape", [str(_SOURCE)], extra_cflags=["-O2"], build_directory=str(folder), verbose=False
        )
        with suppress(OSError):  # another rank was first, and its folder is as good
            folder.rename(home)
    return module
