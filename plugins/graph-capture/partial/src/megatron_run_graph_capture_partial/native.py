"""The executor in C++: one call from Python a replay. It is compiled when it is first used, and kept.

It is compiled in a folder of this process alone, which then gets its name at once. In a shared one torch lets all wait
for a file that the one who compiles removes at the end: they wait for ever once a compilation was killed.
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
            return in_python(operations)  # it knows how to wait for a collective
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
    """Where the source is kept, compiled for this interpreter and this torch; beside torch's own extensions."""
    from torch.utils.cpp_extension import get_default_build_root

    made_of = (_SOURCE.read_text(encoding="utf-8"), torch.__version__, sysconfig.get_config_var("EXT_SUFFIX"))
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    return Path(root) / f"megatron_run_tape-{sha256(repr(made_of).encode()).hexdigest()[:16]}"


def _load(home: Path) -> Any:
    (library,) = home.glob("*.so")
    spec = spec_from_file_location(library.stem, library)
    assert spec is not None
    assert spec.loader is not None  # there is one for every file that ends in .so
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(home: Path) -> Any:
    """Compile and load it, and keep it at ``home``. Ranks that do so at once do not wait for each other."""
    from torch.utils.cpp_extension import load

    home.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{home.name}.", dir=home.parent) as private:
        folder = Path(private) / "build"
        folder.mkdir()
        module = load(
            "megatron_run_tape", [str(_SOURCE)], extra_cflags=["-O2"], build_directory=str(folder), verbose=False
        )
        with suppress(OSError):  # another one was faster: it is there
            folder.rename(home)
    return module
