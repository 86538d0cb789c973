"""Bytes of a rank: what it keeps, what is lent to segments at a time, what is sent, and nothing that grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_run.planning import load_config
from megatron_run_cli.reports import dry_run
from megatron_run_cli.reports.dry_run import dry_run_json
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.resuming import attempt
from tests.support.training import kept_groups

RANKS, STEPS, LAYERS, MICROBATCHES = 2, 5, 4, 2
SETS: dict[str, Any] = {
    "train.steps": STEPS,
    "train.global_batch_size": RANKS * MICROBATCHES,
    "train.micro_batch_size": 1,
    "train.sequence_length": 8,
    "train.precision": "bf16",
    "model.num_layers": LAYERS,
    "model.tie_embeddings": False,
    "eval.interval": 0,
    "eval.batches": 1,
}
#: Bytes of a parameter between steps, of which a rank has its share: bf16 weights, fp32 gradients, masters and moments.
EACH = {"parameters": 2, "gradients": 4, "masters": 4, "state": 8}


@dataclass
class Looked:
    """What one rank saw: what the optimizer says it holds, the ``peak`` that was lent, collectives by step, storages.

    ``kept`` are the bytes that are lent at the end of each step.
    """

    memory: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    collectives: list[Counter[str]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    parameters: int = 0


def look(rank: int, world: int, folder: str, held: int, more: Mapping[str, Any]) -> Looked:
    """Train with everything lent, and ``more`` settings."""
    from megatron_run_engine.optim.loans import Loan
    from megatron_run_engine.runtime.comm import ParallelGroup

    found, lent = Looked(), Counter[int]()
    give, take_back = Loan.give, Loan.take_back
    gather, reduce = ParallelGroup.start_gather_shares, ParallelGroup.start_sum_shares
    counts = Counter[str]()

    def giving(loan: Any) -> None:
        give(loan)
        lent[id(loan)] = loan._flat.untyped_storage().nbytes()
        found.peak = max(found.peak, lent.total())

    def taking(loan: Any) -> None:
        take_back(loan)
        assert not loan._flat.untyped_storage().nbytes()
        lent.pop(id(loan), None)  # it has memory when it is made

    def counted(name: str, collective: Any) -> Any:
        def start(self: Any, flat: Any, shares: Any) -> Any:
            counts[name] += 1
            return collective(self, flat, shares)

        return start

    def after_step(step: int) -> None:
        found.kept.append(lent.total())
        found.collectives.append(Counter(counts))
        counts.clear()

    with (
        found_once(),
        kept_groups(),
        mock.patch.object(Loan, "give", giving),
        mock.patch.object(Loan, "take_back", taking),
        mock.patch.object(ParallelGroup, "start_gather_shares", counted("gather", gather)),
        mock.patch.object(ParallelGroup, "start_sum_shares", counted("reduce", reduce)),
    ):
        plugins = (f"optimizer=zero3,whole_below=0,segments_held={held}",)
        seen = attempt(Path(folder), {**SETS, **more}, plugins, rank=rank, world=world, each_step=after_step)
    found.memory = dict(seen.assembly.optimizer.memory())
    found.parameters = sum(parameter.numel() for each in seen.assembly.infos for parameter in each)
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize("held", [2, 3, 0])
def test_a_rank_holds_its_share_and_what_segments_are_lent(held: int, tmp_path: Path) -> None:
    first, _ = run_ranks(look, RANKS, str(tmp_path), held, {}, timeout=120)
    sets = [f"{key}={str(value).lower()}" for key, value in SETS.items()]
    plugins = [f"optimizer=zero3,whole_below=0,segments_held={held}"]
    # It counts for seconds what nobody reads here.
    with mock.patch.object(dry_run, "_step_memory", return_value=None):
        (planned,) = dry_run_json(load_config("preset:tiny", plugins=plugins, sets=sets, nproc=RANKS))[
            "memory_by_stage"
        ]
    assert first.memory == planned
    padded = planned["parameters"] * RANKS // EACH["parameters"]
    assert first.parameters <= padded < first.parameters * 1.1
    for role, width in EACH.items():
        counts = 4 * 3 * 64 if role == "state" else 0  # of steps, in each group of a bucket
        assert 0 <= planned[role] - width * padded // RANKS <= counts, role
    assert first.peak <= planned["lent"] <= first.peak * 1.02
    assert len({*first.kept[1:]}) == 1  # nothing grows
    # Segments: the table, attention and MLP of each layer, the head. The backward begins with those that are whole.
    segments = 2 + 2 * LAYERS
    gathers = {2: MICROBATCHES * (2 * segments - 2 - 1), 3: MICROBATCHES * (2 * segments - 3 - 1), 0: segments}[held]
    for counts in first.collectives[1:-1]:
        assert counts["reduce"] == MICROBATCHES * segments
        assert counts["gather"] == pytest.approx(gathers, abs=MICROBATCHES)


EXPERTS = {"model.experts.count": 4, "model.experts.ffn_size": 16}


@pytest.mark.multiproc
@pytest.mark.parametrize("held", [1, 2])
@pytest.mark.parametrize("more", [{}, EXPERTS], ids=["dense", "experts"])
def test_what_is_recomputed_together_counts_as_lent(held: int, more: dict[str, Any], tmp_path: Path) -> None:
    first, _ = run_ranks(
        look, RANKS, str(tmp_path), held, {**more, "train.recompute": "full", "train.steps": 2}, timeout=120
    )
    assert 0 < first.peak <= first.memory["lent"]


@pytest.mark.multiproc
def test_ranks_share_the_matrices_of_a_rule_that_needs_them_whole(tmp_path: Path) -> None:
    ranks = run_ranks(look, RANKS, str(tmp_path), 2, {"optimizer.rule": "muon", "train.steps": 2}, timeout=120)
    held = [rank.memory["parameters"] for rank in ranks]
    assert min(held) > 0.8 * max(held)
