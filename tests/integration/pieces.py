"""Many runs on ranks that are started once, and the logical tensors whose pieces the ranks hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.training import Seen, kept_groups, train_here

Array = NDArray[np.floating[Any]]
#: What tensor-parallel ranks do together, by its names in the versions of torch.
_COLLECTIVES = frozenset(
    {
        "all_reduce",
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
    }
)
#: (first sample, layer): where a tensor was seen.
Where = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """A run of ``preset:tiny``; ``dtype`` is that of its parameters, activations and gradients."""

    sets: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    dtype: str = "float32"


class Piece(NamedTuple):
    """Rows from ``start`` and columns from ``column`` of the tensor ``name`` of ``shape``."""

    name: str
    shape: tuple[int, ...]
    start: int
    column: int
    values: Array


@dataclass
class Ran:
    """What one rank saw of one case.

    ``pieces`` are its parts of the first step's gradients, before clipping. Of the first step too: ``stream`` holds
    the digest of the residual stream after each layer's last segment, ``masks`` that of the attention's dropout mask.
    ``text`` is what was generated; ``sent`` counts the bytes given to the pipeline's channels, and ``collectives``
    lists the shapes that went through the tensor-parallel group, in order.
    """

    seen: Seen
    pieces: list[Piece] = field(default_factory=list)
    stream: dict[Where, str] = field(default_factory=dict)
    masks: dict[Where, str] = field(default_factory=dict)
    text: str | None = None
    sent: int = 0
    collectives: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """By step, on rank 0."""
        return self.seen.losses


def run_cases(world: int, cases: Sequence[Case]) -> list[list[Ran]]:
    """Run every case on the same ``world`` ranks, one after the other: by case, by rank.

    Of a whole product, 32 cases at a time: the threads of their groups end with the ranks alone, and slow them down.
    """
    ran: list[list[Ran]] = []
    for batch in (tuple(cases[start : start + 32]) for start in range(0, len(cases), 32)):
        by_rank = run_ranks(_run_cases, world, batch, timeout=30 + 15 * len(batch))  # of a slow machine
        ran += [list(ranks) for ranks in zip(*by_rank, strict=True)]
    return ran


def joined(ranks: Iterable[Ran]) -> dict[str, Array]:
    """The whole logical tensors of all ranks' pieces. Pieces that overlap are equal, and nothing is missing."""
    whole: dict[str, Array] = {}
    for name, shape, start, column, values in (piece for ran in ranks for piece in ran.pieces):
        tensor = whole.setdefault(name, np.full(shape, np.nan, values.dtype))
        rows = slice(start, start + len(values))
        place = (rows, slice(column, column + values.shape[1])) if values.ndim > 1 else (rows,)
        there = tensor[place]
        assert np.isnan(there).all() or np.array_equal(there, values), f"copies of {name} differ"
        tensor[place] = values
    missing = [name for name, tensor in whole.items() if np.isnan(tensor).any()]
    assert not missing, f"no rank holds all of {missing}"
    return whole


def _run_cases(rank: int, world: int, cases: Sequence[Case]) -> list[Ran]:
    with found_once(), kept_groups():
        return [_run_case(rank, world, case) for case in cases]


def _run_case(rank: int, world: int, case: Case) -> Ran:
    import torch

    from megatron_run.config.request import Request
    from megatron_run_engine.evaluation import evaluator
    from megatron_run_engine.runtime.context import Dtypes
    from megatron_run_engine.training import build

    ran, make, write = Ran(Seen()), build.build, evaluator.generate_text

    def watched_build(*arguments: Any) -> Any:
        assembly = make(*arguments)
        _watch_gradients(assembly, ran)
        _watch_segments(assembly, ran)
        _watch_collectives(assembly, ran, patches)
        return assembly

    def written(*arguments: Any) -> str | None:
        ran.text = write(*arguments)
        return ran.text

    dtype = getattr(torch, case.dtype)
    request = Request(configs=("preset:tiny",), sets=case.sets, plugins=case.plugins, nproc=world)
    with ExitStack() as patches:
        for target, replacement in {
            "megatron_run_engine.training.build.build": watched_build,
            "megatron_run_engine.training.build.DTYPES": {"fp32": Dtypes(param=dtype, main=dtype)},
            "megatron_run_engine.training.trainer.generate_text": written,
        }.items():
            patches.enter_context(mock.patch(target, replacement))
        ran.seen = train_here(rank, world, request.to_json())
    ran.seen.gradients.clear()
    return ran


def _watch_gradients(assembly: Any, ran: Ran) -> None:
    """Keep this rank's pieces of the first step's gradients, reduced and made whole."""
    from megatron_run_engine.runtime.gradients import main_grad

    unscale = assembly.optimizer.unscale_

    def watched(factor: Any) -> Any:
        if not ran.pieces:
            for parameter, info in (item for described in assembly.infos for item in described.items()):
                for part in info.parts:
                    rows = main_grad(parameter)[part.local.start : part.local.stop].clone().numpy()
                    ran.pieces.append(Piece(part.name, part.shape, part.start, part.column, rows))
        return unscale(factor)

    assembly.optimizer.unscale_ = watched


def _watch_segments(assembly: Any, ran: Ran) -> None:
    """Look at what leaves each layer, and at the mask that its attention draws, in the first training step."""
    run = assembly.context.segments.run

    def watched(segments: Any, microbatch: Any, environment: Any) -> None:
        if not (microbatch.train and microbatch.step == 1):
            run(segments, microbatch, environment)
            return
        where = (microbatch.sample0, segments[-1].layer)
        with _seeing_masks(ran, where):
            run(segments, microbatch, environment)
        if "x" in segments[-1].outputs:
            ran.stream[where] = _digest(environment["x"])

    assembly.context.segments.run = watched


@contextmanager
def _seeing_masks(ran: Ran, where: Where) -> Iterator[None]:
    """Within: each attention is followed by one of ones, from the same place of the random stream."""
    import torch

    from megatron_run_engine.nn import attention as core_attention

    def watch(attend: Any) -> Any:
        def watched(query: Any, key: Any, value: Any, *rest: Any) -> Any:
            before = torch.get_rng_state()
            result = attend(query, key, value, *rest)
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            query, key, value = (torch.ones_like(tensor) for tensor in (query, key, value))
            ran.masks[where] = _digest(attend(query, key, value, *rest))
            torch.set_rng_state(after)
            return result

        return watched

    ways = ("fused_attention", "matmul_attention")
    with mock.patch.multiple(core_attention, **{way: watch(getattr(core_attention, way)) for way in ways}):
        yield


def _watch_collectives(assembly: Any, ran: Ran, patches: ExitStack) -> None:
    """Count what is sent to other stages, and list what the tensor-parallel ranks do together."""
    import torch.distributed as dist

    isend, tensor_group = dist.isend, assembly.context.groups.group("tensor")

    def counted(tensor: Any, *arguments: Any, **named: Any) -> Any:
        ran.sent += tensor.nbytes
        return isend(tensor, *arguments, **named)

    def listed(name: str, collective: Any) -> Any:
        def call(tensor: Any, *arguments: Any, group: Any = None, **named: Any) -> Any:
            if group is tensor_group is not None:
                ran.collectives.append((name, tuple(tensor.shape)))
            return collective(tensor, *arguments, group=group, **named)

        return call

    patches.enter_context(mock.patch.object(dist, "isend", counted))
    for name in _COLLECTIVES & vars(dist).keys():
        patches.enter_context(mock.patch.object(dist, name, listed(name, getattr(dist, name))))


def _digest(tensor: Any) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]
