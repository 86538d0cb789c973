"""Trains splits of ``context_grid`` and says where they differ from the single process."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.integration.context_grid import STEPS, Split, by_world
from tests.integration.pieces import Array, Case, Piece, Ran, joined
from tests.integration.whole_report import other_numbers
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.training import Seen, kept_groups, train_here

#: Runs of one start of ranks; the threads of their groups end with the ranks alone.
BATCH = 24
#: By type: how far losses may be, relative to them, norms too, and weights, of which fp32 has none: where a gradient is
#: rounding alone, Adam makes a step of it.
LOSSES, NORMS = {"float32": 2e-6, "float64": 1e-7}, {"float32": 2e-5, "float64": 1e-6}
WEIGHTS = 1e-7


@dataclass
class Trained:
    """What became of one split: rank 0's numbers and the whole weights, or the traceback of a rank."""

    split: Split
    seen: Seen
    weights: dict[str, Array]
    failure: str = ""

    def faults(self, alone: Trained) -> Iterator[str]:
        """Where it differs from the single process."""
        if self.failure or alone.failure:
            yield f"{self.split}: {(self.failure or alone.failure).strip()[-1500:]}"
            return
        dtype = self.split.dtype
        tolerances = {"losses": LOSSES[dtype], "norms": NORMS[dtype], "validation": LOSSES[dtype]}
        yield from other_numbers(self.split, self.seen, alone.seen, tolerances)
        if len(self.seen.losses) != STEPS or not self.seen.validation:
            yield f"{self.split}: {len(self.seen.losses)} steps, {len(self.seen.validation)} evaluations"
        if self.weights.keys() != alone.weights.keys():
            yield f"{self.split}: it has {self.weights.keys() ^ alone.weights.keys()}, or lacks them"
        elif dtype == "float64":
            for name, values in self.weights.items():
                if not np.allclose(values, alone.weights[name], rtol=0, atol=WEIGHTS):
                    yield f"{self.split}: {name} is {np.abs(values - alone.weights[name]).max():.1e} off"


def trained(splits: Sequence[Split], texts: Path) -> Iterator[Trained]:
    """Train every split, those of one number of ranks in the same processes."""
    for world, members in by_world(splits).items():
        for batch in (members[start : start + BATCH] for start in range(0, len(members), BATCH)):
            cases = [split.case(texts) for split in batch]
            for split, ranks in zip(batch, run_context_cases(world, cases), strict=True):
                yield _joined(split, ranks)


def run_context_cases(world: int, cases: Sequence[Case]) -> list[tuple[Ran | str, ...]]:
    """What each rank saw of each case, its ``pieces`` those of the weights at the end; or its traceback."""
    return list(zip(*run_ranks(_run_cases, world, cases, timeout=120 + 45 * len(cases)), strict=True))


def _joined(split: Split, ranks: Sequence[Ran | str]) -> Trained:
    failures = [rank for rank in ranks if isinstance(rank, str)]
    runs = [rank for rank in ranks if not isinstance(rank, str)]
    if failures:
        return Trained(split, Seen(), {}, failures[0])
    try:
        return Trained(split, runs[0].seen, joined(runs))
    except AssertionError as differ:
        return Trained(split, runs[0].seen, {}, str(differ))


def _run_cases(rank: int, world: int, cases: Sequence[Case]) -> list[Ran | str]:
    with found_once(), kept_groups():
        return [_run_case(rank, world, case) for case in cases]


def _run_case(rank: int, world: int, case: Case) -> Ran | str:
    """Train; keep this rank's pieces of the weights after the last step. What is refused, is on all ranks."""
    import torch

    from megatron_run.config.request import Request
    from megatron_run_engine.runtime.context import Dtypes
    from megatron_run_engine.training import build

    assemblies, make = list[Any](), build.build

    def watched_build(*arguments: Any) -> Any:
        assemblies.append(make(*arguments))
        return assemblies[-1]

    dtype = getattr(torch, case.dtype)
    request = Request(configs=("preset:tiny",), sets=case.sets, plugins=case.plugins, nproc=world)
    with (
        mock.patch("megatron_run_engine.training.build.build", watched_build),
        mock.patch("megatron_run_engine.training.build.DTYPES", {"fp32": Dtypes(param=dtype, main=dtype)}),
    ):
        try:
            seen = train_here(rank, world, request.to_json())
        except Exception:
            return traceback.format_exc()
    seen.gradients.clear()
    seen.plan = None
    return Ran(seen, list(_weights(assemblies[0])))


def _weights(assembly: Any) -> Iterator[Piece]:
    for parameter, info in (item for described in assembly.infos for item in described.items()):
        for part in info.parts:
            rows = parameter.detach()[part.local.start : part.local.stop].clone().numpy()
            yield Piece(part.name, part.shape, part.start, part.column, rows)
