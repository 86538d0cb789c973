"""Compiled layers compute what eager ones do: a layer, whole steps, pipelines, split backwards and recomputation."""

from __future__ import annotations

import pytest

from megatron_run_engine.runtime.context import BuildContext
from megatron_run_graph_capture_compile.capture import CompileCapture
from megatron_run_graph_capture_compile.compiler import find_compiler
from megatron_run_graph_capture_compile.options import CompileOptions
from megatron_run_testing.check import Check
from megatron_run_testing.graph_capture import graph_capture_checks


def compile_capture(context: BuildContext, **options: object) -> CompileCapture:
    """The plugin's object. The backend runs the traced graphs as they are, with eager operations."""
    chosen = CompileOptions.model_validate({"backend": "aot_eager", **options})
    return CompileCapture(context, chosen, lambda: find_compiler(chosen.backend, chosen.mode))


class ExactCapture(CompileCapture):
    """Held to the bits of eager steps."""

    exact = True


@pytest.mark.parametrize("check", [pytest.param(c, id=c.name) for c in graph_capture_checks(compile_capture)])
def test_it_conforms(check: Check) -> None:
    check.run()
