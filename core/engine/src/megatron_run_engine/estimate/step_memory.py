"""Counts the most bytes of tensors that a rank of each stage holds in a step, without computing any.

Each chunk runs one forward and one backward on fake tensors, with the run's own layers, gradient buckets and
recomputation, and the bytes alive are watched after every operator. A walk over the stage's lowered instructions then
adds up what is alive at once: the microbatches in flight, what the running action takes for itself, receives that are
posted and sends that are not retired. Parameters, gradients and state are ``Optimizer.memory``'s.

It counts what any layers of one run save, on a CPU too and with biases, norms and masks, but takes seconds and torch.
``ModelCosts`` are a closed form of a GPU's layers, for ``plan``, which asks for thousands of splits without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_run.contracts import Microbatch
from megatron_run.contracts.topology import Topology
from megatron_run.errors import RunError
from megatron_run.pipeline.lower import lower
from megatron_run_engine.estimate.model_size import MOST_RUN, layers_to_build
from megatron_run_engine.estimate.planned_groups import PlannedGroups, microbatch_field, received_tensors
from megatron_run_engine.nn.device import PlannedMode
from megatron_run_engine.nn.linear import can_widen
from megatron_run_engine.optim.buckets import build_buckets
from megatron_run_engine.runtime.context import planned_device
from megatron_run_engine.runtime.operands import tensors_in
from megatron_run_engine.runtime.parameter_init import describe_parameters, trained
from megatron_run_engine.training.build import (
    DTYPES,
    LOOKAHEAD,
    build_chunks,
    make_context,
    make_layers,
    with_vocabulary,
)
from megatron_run_engine.training.checked_plugins import module_of

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import Boundary, Chunk, ChunkOut
    from megatron_run.contracts.schedule import Action
    from megatron_run.pipeline.lower import Instruction, Message
    from megatron_run.planning import ResolvedRun

_CPU = torch.device("cpu")
#: What a chunk gets from the one before it: x, and by name what is beside it.
Received = tuple["Tensor | None", dict[str, "Tensor"]]


class LiveBytes(TorchDispatchMode):
    """Watches the tensors with values that operators make within the block, each by its storage, while they exist."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.peak = 0
        self._made: dict[StorageWeakRef, int] = {}
        self._most = 0  # bytes alive, and of what was freed since it was last looked at

    @property
    def now(self) -> int:
        """Bytes alive; what follows may raise :attr:`peak` above them."""
        self._made = {place: size for place, size in self._made.items() if not place.expired()}
        self._most = sum(self._made.values())
        return self._most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {StorageWeakRef(each.untyped_storage()) for each in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            place = StorageWeakRef(storage)
            if place not in given and place not in self._made and tensor.device.type != "meta":
                self._made[place] = storage.nbytes()
                self._most += storage.nbytes()
        if self._most > self.peak:  # only then it matters what of it is gone
            self.peak = max(self.peak, self.now)
        return result

    def above(self, work: Callable[[], Any]) -> tuple[Any, int]:
        """The result of ``work``, and the most bytes alive while it ran beyond those before."""
        before = self.peak = self.now
        result = work()
        return result, self.peak - before


class ChunkBytes(NamedTuple):
    """Bytes of one microbatch in a chunk.

    ``kept`` from its forward to its backward beside its input, ``waiting`` from I to W; the others are the most that an
    action takes beyond what was alive when it began; ``alone`` is a forward that keeps nothing, counted where a plan
    recomputes. ``out`` and ``back`` are the messages of a forward and a backward.
    """

    kept: int
    waiting: int
    forward: int
    alone: int
    backward: int
    input: int
    weight: int
    out: int
    back: int


def step_memory(run: ResolvedRun, *, gpu: bool | None = None) -> list[dict[str, int]] | None:
    """Bytes beside parameters and state at the peak of a step, by role, for a rank of each stage.

    On a ``gpu`` layers take what its kernels take (:mod:`megatron_run_engine.nn.fused`); None: as on the device that
    the run is planned for. The roles are ``activations``, ``temporaries`` of the running action and ``communication``.
    None where layers cannot run without values (experts whose shapes follow the routing, kernels of other libraries),
    and where there are more than are run one by one.
    The model must have been built once (``model_size``), which says what is wrong with it.
    """
    plan = run.plans[max(run.plans)]
    if layers_to_build(run) > MOST_RUN:
        return None
    if gpu is None:
        gpu = planned_device(run.config.run, run.sizes.world).type == "cuda"
    try:
        known: dict[object, list[ChunkBytes]] = {}
        counted = [count_chunks(run, stage, known, gpu=gpu) for stage in range(plan.stages)]
    except (RuntimeError, RunError):
        return None
    data = run.make_data()
    train = run.config.train
    length = train.sequence_length // run.sizes.context
    fields = sum(microbatch_field(field, train.micro_batch_size, length).nbytes for field in data.fields)
    found = []
    for stage, chunks in enumerate(counted):
        ends = {place.stage for place in (run.layout[0], run.layout[-1])}
        found.append(walk(lower(plan, stage, LOOKAHEAD), chunks, fields if stage in ends else 0))
    return found


def walk(program: Sequence[Instruction], chunks: Sequence[ChunkBytes], fields: int) -> dict[str, int]:
    """Bytes by role at the peak of ``program``; each microbatch's ``fields`` stay until the step ends."""
    recomputed = {i.action[1:] for i in program if i.action.op == "R"}
    loaded: set[int] = set()
    buffers: dict[Message, int] = {}
    held = 0
    best = {"activations": 0, "temporaries": 0, "communication": 0}
    for each in program:
        action, size = each.action, chunks[each.action.chunk]
        for message in each.post:
            buffers[message] = size.back if message.kind == "x" else size.out
        for message in each.retire:
            buffers.pop(message, None)
        loaded.add(action.microbatch)
        taken = _taken(action, size, recomputed)
        now = {"activations": held + fields * len(loaded), "temporaries": taken, "communication": sum(buffers.values())}
        best = max(best, now, key=lambda roles: sum(roles.values()))
        held += _grown(action, size, recomputed)
        if each.receive is not None:
            buffers.pop(each.receive, None)
            if each.receive.kind == "x":
                held += size.back  # the input stays with the microbatch
        if action.op in "BI" and size.back:
            held -= size.back
        if each.send is not None:
            buffers[each.send] = size.out if each.send.kind == "x" else size.back
    return best


def _taken(action: Action, size: ChunkBytes, recomputed: set[tuple[int, int]]) -> int:
    if action.op == "F":
        return size.alone if action[1:] in recomputed else size.forward
    return {"B": size.backward, "I": size.input, "W": size.weight, "R": size.forward}.get(action.op, 0)


def _grown(action: Action, size: ChunkBytes, recomputed: set[tuple[int, int]]) -> int:
    if action.op == "R" or (action.op == "F" and action[1:] not in recomputed):
        return size.kept
    return {"B": -size.kept, "I": size.waiting - size.kept, "W": -size.waiting}.get(action.op, 0)


def count_chunks(
    run: ResolvedRun, stage: int, known: dict[object, list[ChunkBytes]], *, gpu: bool = False
) -> list[ChunkBytes]:
    """The bytes of each chunk of ``stage``, in the order of chunks. Stages with equal chunks are counted once."""
    data = run.make_data()
    options = with_vocabulary(run, data)
    first = Topology(run.sizes, 0)
    topology = Topology(run.sizes, first.rank_at(stage=stage))
    dtypes = DTYPES[run.config.train.precision]
    can_widen(torch.empty(0, dtype=dtypes.param), dtypes.main)  # it computes once, which fake tensors cannot
    with PlannedMode(gpu=gpu):
        context = make_context(run, topology, PlannedGroups(), _CPU, options, data.fields)
        model, positions, chunks = build_chunks(run, context, make_layers(run, context))
        alike = tuple(zip(map(bool, positions), map(_shapes, chunks), strict=True))
        if alike in known:
            return known[alike]
        infos = [describe_parameters(chunk, topology.tensor_rank) for chunk in chunks]
        for described in infos:
            for parameter, info in trained(described).items():
                context.gradients.adopt(parameter, info.name)
        # An optimizer may talk to its peers, or have a library look at addresses: gradients get buffers without it.
        own_type = getattr(run.one("optimizer").options, "grad_dtype", "main") == "param"
        build_buckets([trained(described) for described in infos], 1, None if own_type else dtypes.main)
        train = run.config.train
        size, length = train.micro_batch_size, context.pieces.part(train.sequence_length)
        fields = {field.name: microbatch_field(field, size, length) for field in data.fields}
        microbatch = Microbatch(0, 1, 0, fields)
        ops = {action.op for actions in run.plans[max(run.plans)].lists for action in actions}
        found = []
        for position, chunk in zip(positions, chunks, strict=True):
            boundary = model.boundary(microbatch, size, length)

            def start(boundary: Boundary = boundary, at: int = position) -> Received:
                return received_tensors(boundary) if at else (None, {})

            with context.rng.left_alone():
                with torch.no_grad():
                    _call(chunk, start(), microbatch)  # what the first call allocates for good
                found.append(_count(chunk, start, microbatch, None, alone="R" in ops))
                if "I" in ops:
                    halves = _count(chunk, start, microbatch, context.gradients)
                    found[-1] = halves._replace(backward=found[-1].backward, alone=found[-1].alone)
    known[alike] = found
    return found


def _shapes(chunk: Chunk) -> object:
    """Equal for chunks that hold as many bytes: the kinds of their modules, and the shapes of their parameters."""
    module = module_of(chunk)
    return tuple(map(type, module.modules())), tuple(each.shape for each in module.parameters())


def _call(chunk: Chunk, received: Received, microbatch: Microbatch) -> ChunkOut:
    return chunk(received[0], microbatch, **received[1])


def _count(
    chunk: Chunk, start: Callable[[], Received], microbatch: Microbatch, gradients: Any, *, alone: bool = False
) -> ChunkBytes:
    """Run ``chunk`` forward and backward, with ``gradients`` in its two halves, as the executor does.

    With ``alone`` it runs forward once more, before, and keeps nothing.
    """
    live = LiveBytes()
    with live:
        held: list[Received] = [start()]
        back = _bytes((held[0][0], *held[0][1].values()))
        with torch.no_grad():
            most = live.above(lambda: _call(chunk, held[0], microbatch))[1] if alone else 0
        out, forward = live.above(lambda: _call(chunk, held[0], microbatch))
        ends = [total for total, _ in out.losses.values() if total.requires_grad]
        sent = [each for each in (out.x, *out.beside.values()) if each is not None and each.requires_grad]
        message = _bytes(sent)
        roots, seeds = [get_gradient_edge(each) for each in (*ends, *sent)], [torch.zeros_like(each) for each in ends]
        before = live.now
        seeds += [torch.zeros_like(each) for each in sent]
        arrived = live.now - before
        del out, ends, sent
        kept = live.now - arrived - back

        def backward(roots: list[Any] = roots, seeds: list[Tensor] = seeds) -> None:
            torch.autograd.backward(roots, seeds)

        if gradients is None:
            _, whole = live.above(backward)
            return ChunkBytes(kept, 0, forward, most, whole, 0, 0, message, back)
        with gradients.deferring((0, 0)):
            _, first = live.above(backward)
        del roots, seeds, backward
        held.clear()
        waiting = live.now
        _, second = live.above(lambda: gradients.run_deferred((0, 0)))
    return ChunkBytes(kept, waiting, forward, most, 0, first, second, message, back)


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages of ``tensors``, of which several may share one."""
    storages = [each.untyped_storage() for each in tensors if each is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
