"""Muon's step beside torch's on one process, and of matrices in parts beside ranks that each do all of it.

A step is the rule's alone: momentum, orthogonalisation, update. Results are compared before anything is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Muon

from benchmarks.support.goals import apart_text
from benchmarks.support.quiet import ratio, timed
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table
from megatron_run.contracts import Part
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.optim import newton_schulz
from megatron_run_engine.optim.split_muon import SplitMuon
from megatron_run_engine.runtime.comm import ParallelGroup, create_groups

LR = 1e-3
OURS, ONE_BY_ONE, TORCH, NAIVE = "ours", "ours, one by one", "torch.optim.Muon", "naive: every rank has all"
#: Values are apart by so much of the step that they take, at most: products in bf16 round.
TOLERANCE = 0.02


class Matrices(NamedTuple):
    """Shapes of matrices, and how many there are of each."""

    what: str
    shapes: Mapping[tuple[int, int], int]

    @property
    def all(self) -> list[tuple[int, int]]:
        """One after the other."""
        return [shape for shape, count in self.shapes.items() for _ in range(count)]


DENSE = Matrices(
    "2 layers, hidden 512: 8 matrices of 512 x 512, and a feed-forward layer of 2048 in each",
    {(512, 512): 8, (2048, 512): 2, (512, 2048): 2},
)
EXPERTS = Matrices("128 experts of 64 x 128, twice, and back", {(64, 128): 256, (128, 64): 128})
CASES = {"dense": DENSE, "experts": EXPERTS}


def drawn(shape: Sequence[int], number: int) -> Tensor:
    """Random values, equal on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


class Side:
    """Matrices, of which a rank may have ``own`` alone, and what updates them."""

    def __init__(self, case: str, own: Callable[[Tensor], Tensor], make: Callable[[list[Parameter]], Any]) -> None:
        shapes = CASES[case].all
        self.first = [own(drawn(shape, index)) for index, shape in enumerate(shapes)]
        self.parameters = [Parameter(values.clone()) for values in self.first]
        for index, (parameter, shape) in enumerate(zip(self.parameters, shapes, strict=True)):
            parameter.grad = own(drawn(shape, 10_000 + index)).clone()
        self._rule = make(self.parameters)

    def step(self) -> None:
        """One update by gradients that stay."""
        self._rule.step()

    def moved(self) -> list[Tensor]:
        """How far each matrix has come."""
        return [p.detach() - first for p, first in zip(self.parameters, self.first, strict=True)]


class OneByOne(SplitMuon):
    """Ours, with a product for each matrix."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """As ours."""
        with mock.patch.object(newton_schulz, "MOST_ON_CPU", 1):
            return super().step(closure)


class Naive(Muon):
    """torch's, on whole matrices that every rank puts together for itself, one after the other."""

    def __init__(self, parts: list[Parameter], peers: ParallelGroup) -> None:
        self._parts, self._peers = parts, peers
        wholes = [Parameter(peers.gather(part.detach())) for part in parts]
        super().__init__(wholes, lr=LR)

    def step(self, closure: Any = None) -> Any:
        """Gather each gradient, update each matrix, keep this rank's rows."""
        wholes = self.param_groups[0]["params"]
        for whole, part in zip(wholes, self._parts, strict=True):
            assert part.grad is not None
            whole.grad = self._peers.gather(part.grad)
        super().step(closure)  # type: ignore[no-untyped-call]  # torch's
        with torch.no_grad():
            for whole, part in zip(wholes, self._parts, strict=True):
                part.copy_(whole.chunk(self._peers.size)[self._peers.index])


def _split(parts: list[Parameter], peers: ParallelGroup, kind: type[SplitMuon]) -> SplitMuon:
    rule = kind(parts, lr=LR)
    whole = ((p.shape[0] * peers.size, p.shape[1]) for p in parts)
    rule.split({p: Part("w", shape, range(len(p))) for p, shape in zip(parts, whole, strict=True)}, peers)
    return rule


def measure(case: str, samples: int) -> dict[str, Any]:
    """Rounds of all sides; on several ranks each has equal rows of every matrix."""
    world = dist.get_world_size()
    topology = Topology(Sizes(tensor=world), dist.get_rank())
    peers = create_groups(topology, dist.default_pg_timeout).parallel_group(topology, "tensor")

    def own(whole: Tensor) -> Tensor:
        return whole.chunk(world)[peers.index]

    makers: dict[str, Callable[[list[Parameter]], Any]] = {
        OURS: lambda parts: _split(parts, peers, SplitMuon),
        ONE_BY_ONE: lambda parts: _split(parts, peers, OneByOne),
        **({TORCH: lambda parts: Muon(parts, lr=LR)} if world == 1 else {NAIVE: lambda parts: Naive(parts, peers)}),
    }
    sides = {name: Side(case, own, make) for name, make in makers.items()}
    for side in sides.values():
        side.step()
    expected = sides[NAIVE if world > 1 else TORCH].moved()
    apart = {name: max(map(_apart, side.moved(), expected)) for name, side in sides.items()}
    assert max(apart.values()) <= TOLERANCE, apart
    rounds = [{k: v for name, side in sides.items() for k, v in timed(name, side.step).items()} for _ in range(samples)]
    return {"apart": apart, "samples": rounds}


def _apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def report(*, quick: bool) -> Iterator[str]:
    """Both cases, on one process and on two ranks."""
    yield "\n## Muon's step alone\n"
    yield "In fp32, orthogonalised in bf16. `apart`: of the largest step of a value. On two ranks, each has half of the"
    yield "rows of every matrix.\n"
    columns = ("matrices", "ranks", "side", "step, ms", "of ours", "processor time of ours", "apart", "samples used")
    yield from table(columns, _rows(5 if quick else 21))


def _rows(samples: int) -> Iterator[tuple[str, ...]]:
    for case, matrices in CASES.items():
        for world in (1, 2):
            found = on_ranks(measure, world, {"case": case, "samples": samples}, keeping=True)
            for name in found["apart"]:
                kept, times = ratio(found["samples"], name, OURS)
                _, processor = ratio(found["samples"], name, OURS, "processor")
                milliseconds = 1e3 * statistics.median(each[f"{name} seconds"] for each in kept.samples)
                cells = (f"{milliseconds:.1f}", f"{times:.2f}", f"{processor:.2f}", apart_text(found, name), str(kept))
                yield matrices.what, str(world), name, *cells
