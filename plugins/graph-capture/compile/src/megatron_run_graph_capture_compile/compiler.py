"""Compiles a graph by ``torch.compile``, or reports what is missing."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from shutil import which
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode

from megatron_run.errors import PluginError
from megatron_run.errors.wording import advice, did_you_mean
from megatron_run.files.user_cache import COMPILED, keep_compiled
from megatron_run_engine.nn import triton_lack

if TYPE_CHECKING:
    from megatron_run_graph_capture_compile.compiled import Compiled, Compiler

_INSTEAD = "choose --plugin graph-capture=none"
#: Beginnings of inductor's warnings that tell of no fault: ``train.matmul_precision`` is the user's choice, and a
#: softmax in two passes gives the same values.
_NO_FAULTS = ("TensorFloat32 tensor cores", r"\s*Online softmax is disabled")


def check_compiler(device: torch.device, backend: str) -> None:
    """Raise :class:`PluginError` if ``backend`` is unknown, or needs a compiler for ``device`` that is missing."""
    if backend != "inductor":
        known = torch.compiler.list_backends(exclude_tags=())  # seconds of imports, and inductor is always one
        if backend not in known:
            common = [*torch.compiler.list_backends(), "aot_eager"]
            raise PluginError(
                f"graph-capture.backend={backend} is not a backend of torch.compile",
                fix=advice(did_you_mean(backend, known), f"choose one of {', '.join(common)}"),
            )
        return
    _check_cache()
    if device.type == "cuda":
        if (lack := triton_lack()) is not None:
            raise PluginError(
                "graph-capture=compile has no compiler for a GPU", why=lack.why, fix=f"{lack.fix}, or {_INSTEAD}"
            )
        return
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if which(name) is None:
        raise PluginError(
            f"graph-capture=compile needs a C++ compiler, and {name} is not found",
            fix=f"install {name}, name another in CXX, or {_INSTEAD}",
        )


def _check_cache() -> None:
    """Raise :class:`PluginError` if there is no folder of this user's alone for what inductor compiles and loads."""
    try:
        keep_compiled(os.environ)
    except OSError as cause:
        raise PluginError(
            "graph-capture=compile has no folder for compiled libraries",
            why=cause.strerror or str(cause),
            fix=f"set {COMPILED} to a folder in which only you may write, or {_INSTEAD}",
        ) from cause


def find_compiler(backend: str, mode: str) -> Compiler:
    """A function that compiles graphs with a ``backend`` of ``torch.compile``, for inductor in ``mode``.

    The backend is called itself. ``torch.compile`` would read Python again, of which a graph has none, and check guards
    in each call, which a graph does not need: it is called with tensors like its examples only.
    """
    if backend == "inductor":
        _check_cache()

    def compile_graph(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Compiled:
        with warnings.catch_warnings():
            for message in _NO_FAULTS:
                warnings.filterwarnings("ignore", message, UserWarning)
            return make(graph, examples)

    def make(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Compiled:
        if backend == "inductor":
            compiled = _through_inductor(graph, examples, mode)
        else:
            from torch._dynamo import lookup_backend

            compiled = lookup_backend(backend)(graph, list(examples))
        compiled(*examples)  # what is left to compile is compiled now, not in the first step
        return compiled

    return compile_graph


@contextmanager
def own_workers() -> Iterator[None]:
    """End the processes that inductor starts within, which would live as long as this one; it can start others.

    Where some are there before, it starts none: they are those of the program that trains, and go on.
    """
    others = bool(getattr(_workers(), "_pool_set", ()))
    try:
        yield
    finally:
        if not others and (workers := _workers()) is not None:
            workers.shutdown_compile_workers()


def _workers() -> Any:
    """The module that keeps them; None until something imports it, which takes a second."""
    return sys.modules.get("torch._inductor.async_compile")


def _through_inductor(graph: fx.GraphModule, examples: Sequence[Tensor], mode: str) -> Compiled:
    options = {
        **torch._inductor.list_mode_options(mode),
        # Operations that draw, such as fused attention, draw what an eager run draws.
        "fallback_random": True,
        # A check of every input in every call takes longer than a small kernel, and the layouts are those compiled for.
        "size_asserts": False,
        # Its workers share the rank's cores, as threads do: torch would start as many in each rank as there are cores.
        "compile_threads": torch.get_num_threads(),
    }
    if "deterministic" in torch._inductor.list_options():  # since PyTorch 2.10: kernels are not chosen by measuring
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    # Without an environment for symbols of shapes, inductor neither finds nor keeps graphs in its cache on disk, by
    # which every later start takes a second where the first takes a minute. None is made: kernels of known shapes are
    # faster, and given real tensors it would take every size for unknown.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # it imports sympy, for half a second

    _lay_out_draws()
    fake = FakeTensorMode(shape_env=ShapeEnv())
    known = [fake.from_tensor(x, static_shapes=True) for x in examples]
    with tracing(TracingContext(fake)):
        compiled: Compiled = torch._inductor.compile(graph, known, options=options)
    return compiled


def _lay_out_draws() -> None:
    """Keep the layout of what dropout is given: it draws a mask in the order in which values lie in memory.

    Inductor chooses layouts, and PyTorch 2.11 has no constraint for this operation, as later ones have.
    """
    from torch._inductor import lowering

    lowering.add_layout_constraint(torch.ops.aten.native_dropout.default, lowering.constrain_to_fx_strides)
