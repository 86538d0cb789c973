"""The options, and the entry points for the engine: which segments are compiled, when, and for which shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import CaptureSize, GraphCapture
from megatron_run.errors import GraphCaptureError, InputError, PluginError
from megatron_run_engine.capture import (
    STEP,
    FixedAddresses,
    StepGraph,
    call,
    check_capture,
    check_scope,
    choose_regions,
    every_segment,
    lint,
)
from megatron_run_engine.runtime import main_grad
from megatron_run_graph_capture_compile.compiler import own_workers

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import Microbatch, Region, Segment
    from megatron_run.contracts.schedule import Action
    from megatron_run.contracts.schema import Config
    from megatron_run_engine.runtime import BuildContext
    from megatron_run_graph_capture_compile.compiled import CompiledRegion, Compiler, GraphStore

#: The scope without ``graph-capture.scope`` on a CPU: what layers hold, as far as the model publishes it. Head and loss
#: take long to compile there and gain little, as do products of experts. On a GPU it is all that can be compiled.
LAYERS = ("attn", "mlp", "moe_router", "moe_preprocess", "moe_combine")
#: Backends that run a graph by PyTorch's own operations.
OPERATIONS = ("aot_eager", "eager")
#: Shape, type and ``requires_grad`` of each input of a region.
_Shapes = tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]


class CompileOptions(BaseModel):
    """Options of compilation: of which regions, how, and how often again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="segments; unset: on a GPU all that can be compiled, on a CPU those of layers. Those of gpt: "
        "embedding, attn, mlp, moe_router, moe_preprocess, moe_dispatch, moe_experts, moe_combine, head, loss; or "
        "step: all of them, in one graph of forward and backward of the step",
    )
    backend: str = Field("inductor", min_length=1, description="of torch.compile; aot_eager compiles nothing")
    mode: Literal["default", "max-autotune-no-cudagraphs"] = Field(
        "default", description="of inductor; max-autotune-no-cudagraphs tries more kernels, for minutes"
    )
    capture_after: int = Field(1, ge=1, description="eager steps before the compilation")
    recompile_limit: int = Field(8, ge=1, description="shapes that a segment is compiled for; others run eagerly")
    graph_limit: int = Field(
        64,
        ge=2,
        description="graphs unlike each other that are compiled, which bounds the start; the rest runs eagerly",
    )
    strict: bool = Field(False, description="another shape raises an error instead of another compilation")


def check_config(config: Config, options: CompileOptions) -> Iterator[str]:
    """Notice if nothing would be compiled.

    Raises InputError for a name given twice, what breaks ``strict``, or a step that no graph can hold.
    """
    split = [
        f"parallel.{axis}={size}" for axis in ("tensor", "context") if (size := getattr(config.parallel, axis)) > 1
    ]
    if STEP in (options.scope or ()) and split:
        raise InputError(
            f"graph-capture=compile,scope={STEP} with {' and '.join(split)}",
            why="compiled regions call collectives that no graph has recorded yet",
            fix=f"leave scope={STEP} out, or choose --plugin graph-capture=partial,scope={STEP}",
        )
    yield from check_capture("compile", config, options, recomputes=True, default=LAYERS, whole_step=True)


def check_recorded(device: torch.device, options: CompileOptions) -> None:
    """Raise :class:`PluginError` for a step whose compiled kernels no graph of ``device`` can hold.

    Tapes record PyTorch's operations, and inductor's kernels for CPUs are none.
    """
    if STEP in (options.scope or ()) and device.type == "cpu" and options.backend not in OPERATIONS:
        raise PluginError(
            f"graph-capture.scope={STEP} with graph-capture.backend={options.backend} on a CPU",
            why="what it compiles for CPUs cannot be recorded",
            fix=f"leave scope={STEP} out, or try the graph alone by graph-capture.backend={OPERATIONS[0]}",
        )


class CompileCapture(GraphCapture):
    """Compiles the segments of ``options.scope``; ``find_compiler`` is called when something is compiled.

    A compiled region holds no memory between its calls, needs no order of replays, and may run again in the backward.
    So a capture fits every step of the run; a new shape leads to another compilation of that region alone. A graph of
    the whole step launches the kernels of the compiled regions, and fits as long as nothing moves.
    """

    exact = False
    reruns = True
    replays_within = True

    def __init__(self, context: BuildContext, options: CompileOptions, find_compiler: Callable[[], Compiler]) -> None:
        self.context, self._options, self._find_compiler = context, options, find_compiler
        self.capture_after = options.capture_after
        self.whole_step = STEP in (options.scope or ())
        self.captures_steps = context.topology.sizes.tensor == context.topology.sizes.context == 1
        self._step: StepGraph | None = None
        self._read = set[torch.UntypedStorage]()  # by regions that run eagerly within the graph of a step, too
        self._store: GraphStore | None = None
        self._compiled: dict[Region, dict[_Shapes, CompiledRegion]] = {}
        self._fixed: FixedAddresses | None = None
        self._full: set[Region] = set()  # regions that have reached recompile_limit
        self._eager: set[Region] = set()  # regions that are not compiled

    def regions(self, chunks: Sequence[Sequence[Segment]]) -> Sequence[Region]:
        """Return the regions of neighbouring segments in the scope; of all segments if steps are captured whole."""
        scope = self._options.scope
        if self.whole_step:
            return every_segment(chunks)
        if scope is not None:
            check_scope(scope, chunks, self.context)
            return choose_regions(chunks, scope)
        published = {segment.name for segments in chunks for segment in segments}
        on_cpu = self.context.trains_on.type == "cpu"
        return choose_regions(chunks, LAYERS if on_cpu else published, leave_eager=True)

    def plan(self, regions: Sequence[Region], actions: Sequence[Action]) -> CaptureSize:
        """The graphs of regions that do not look alike: a forward each, and a backward where there is one."""
        differentiable = {_look(region): region.differentiable for region in regions}
        graphs = len(differentiable) + sum(differentiable.values()) + self.whole_step
        return CaptureSize(len(regions), graphs, slots=0)

    def capture(
        self,
        regions: Sequence[Region],
        actions: Sequence[Action],
        examples: Mapping[Region, tuple[Tensor, ...]],
    ) -> CaptureSize:
        """Check every region against the rules, and compile what no other has compiled before.

        What breaks a rule runs eagerly, with a warning, unless the user has named the scope. So does, within the graph
        of a whole step, what keeps the rules and cannot be compiled.
        """
        from megatron_run_graph_capture_compile.compiled import GraphStore

        context = self.context
        if self._store is None:
            self._store = GraphStore(self._find_compiler(), self._options.graph_limit)
            self._compiled, self._eager = {region: {} for region in regions}, set()
        with own_workers():
            for region in regions:
                if region not in examples:
                    raise GraphCaptureError(f"{region} has not run yet", why="what it is given is not known")
                rules = partial(lint, region, examples[region], context.device, context.gradients, context.rng.streams)
                if self.whole_step:
                    self._read.update(rules().read)
                with self._eager_if_refused(region):
                    if not self.whole_step:
                        rules()
                    if region not in self._eager and _shapes(examples[region]) not in self._compiled[region]:
                        self._compile(region, examples[region])
        self._fixed = FixedAddresses.of(regions, actions)
        return CaptureSize(len(regions) - len(self._eager), self._store.compiled, slots=0)

    def capture_step(
        self,
        run: Callable[[], None],
        regions: Sequence[Region],
        actions: Sequence[Action],
        examples: Mapping[Region, tuple[Tensor, ...]],
    ) -> CaptureSize:
        """Record a step that runs what was compiled."""
        self._step = StepGraph(run, regions, actions, self.context, read=self._read)
        return self._step.size

    def replay_step(self) -> None:
        """Replay the recorded step."""
        assert self._step is not None  # replays happen between capture and invalidate only
        self._step.replay()

    def mismatch(self, actions: Sequence[Action]) -> str:
        """Return which parameters were moved, frozen, or are trained again; to single regions any actions fit."""
        if self._store is None:
            return "nothing is compiled"
        return self._changed() if self._step is None else self._step.mismatch(actions)

    def replay(self, region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the compiled region; for a new shape compile it first, up to ``recompile_limit`` shapes."""
        found = self._compiled[region].get(_shapes(tensors))
        if found is None and region not in self._eager:
            found = self._compile_again(region, tensors)
        return call(region, tensors, recompute=False) if found is None else found(tensors)

    def invalidate(self, reason: str) -> None:
        """Forget the graph of the step, and what was compiled unless it still fits.

        Raises :class:`GraphCaptureError` with ``strict``.
        """
        if self._options.strict:
            raise GraphCaptureError(
                f"what was compiled no longer fits: {reason}",
                fix="leave graph-capture.strict out to compile again, at the cost of a pause",
            )
        if self._step is not None and not self._changed():
            self.context.log.warning("the graph of the step will be recorded again: %s", reason)
            self._step = None
            return
        self.context.log.warning("segments will be compiled again: %s", reason)
        self._store, self._step, self._compiled = None, None, {}
        self._full.clear()
        self._read.clear()

    def _compile(self, region: Region, tensors: Sequence[Tensor]) -> CompiledRegion | None:
        """Compile ``region`` for such ``tensors``; None beyond ``graph_limit``."""
        from megatron_run_graph_capture_compile.compiled import CompiledRegion
        from megatron_run_graph_capture_compile.graph_trace import trace

        assert self._store is not None
        traced = trace(region, tensors, self.context)
        graphs = self._store.get(traced, str(region))
        if graphs is None:
            self._leave_eager(region, f"{self._store.compiled} graphs are compiled (graph-capture.graph_limit)")
            return None
        compiled = CompiledRegion(traced, graphs, self.context.gradients)
        self._compiled[region][_shapes(tensors)] = compiled
        return compiled

    @contextmanager
    def _eager_if_refused(self, region: Region) -> Iterator[None]:
        """Let ``region`` run eagerly where it breaks a rule within, unless the user has named the scope."""
        try:
            yield
        except GraphCaptureError as refused:
            if self._options.scope is not None and not self.whole_step:
                raise
            self._leave_eager(region, f"{refused.what}: {refused.why}" if self.whole_step else str(refused))

    def _leave_eager(self, region: Region, why: str) -> None:
        """Compile no more of ``region``, and say so once for all layers that are alike."""
        if _names(region) not in map(_names, self._eager):
            self.context.log.warning("%s runs eagerly: %s", region, why)
        self._eager.add(region)

    def _compile_again(self, region: Region, tensors: Sequence[Tensor]) -> CompiledRegion | None:
        """Compile ``region`` for another shape and say so; None where that was done too often or is refused."""
        given = ", ".join(str(tuple(x.shape)) for x in tensors)
        if self._options.strict:
            self.invalidate(f"{region} was given {given}")
        limit = self._options.recompile_limit
        if len(self._compiled[region]) >= limit:
            if region not in self._full:
                self._full.add(region)
                self.context.log.warning(
                    "%s runs eagerly with %s: it was compiled for %d shapes (graph-capture.recompile_limit)",
                    *(region, given, limit),
                )
            return None
        before, compiled = self._store.compiled if self._store else 0, None
        with own_workers(), _kept_gradients(region), self._eager_if_refused(region):
            compiled = self._compile(region, tensors)
        if self._store and self._store.compiled > before:
            self.context.log.warning("%s was compiled again in this step, for %s", region, given)
        return compiled

    def _changed(self) -> str:
        """Tell what has changed of the parameters since the compilation; empty if nothing has."""
        return "" if self._fixed is None else self._fixed.changed(self._fixed.actions)


@contextmanager
def _kept_gradients(region: Region) -> Iterator[None]:
    """Restore the gradients of ``region`` afterwards: within a step they hold those of earlier microbatches.

    A trace adds what the layers give for zeros, which is NaN where one divides by the norm of its input.
    """
    gradients = [main_grad(p) for segment in region.segments for p in segment.params if p.requires_grad]
    before = [gradient.clone() for gradient in gradients]
    try:
        yield
    finally:
        for gradient, values in zip(gradients, before, strict=True):
            gradient.copy_(values)


def _shapes(tensors: Sequence[Tensor]) -> _Shapes:
    return tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in tensors)


def _names(region: Region) -> tuple[str, ...]:
    return tuple(segment.name for segment in region.segments)


def _look(region: Region) -> tuple[object, ...]:
    """The common traits of regions that share graphs, as far as it is known before anything has run."""
    return _names(region), tuple((tuple(p.shape), p.dtype, p.requires_grad) for s in region.segments for p in s.params)
