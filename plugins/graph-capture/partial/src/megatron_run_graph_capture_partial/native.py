"""The executor in C++: one call from Python a replay. It is compiled when it is first used, and kept by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron_run_graph_capture_partial.executors import call_of, in_python
from megatron_run_graph_capture_partial.tape import Executor, Operation


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
    from torch.utils.cpp_extension import load

    source = Path(__file__).with_name("native.cpp")
    return load("megatron_run_tape", [str(source)], extra_cflags=["-O2"], verbose=False)
