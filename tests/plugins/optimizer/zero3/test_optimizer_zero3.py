"""ZeRO-3 trains what the replicated optimizer trains, says what it costs, and refuses what needs a fixed place.

The promises of optimizers are checked with those of other plugins (``tests/contracts``).
"""

from __future__ import annotations

import pytest

from megatron_run.config.request import Request
from megatron_run.planning import load_config
from tests.support.resolving import mistake
from tests.support.training import train_many


def notices(*sets: str) -> list[str]:
    run = load_config("preset:tiny", plugins=["optimizer=zero3"], sets=[*sets], nproc=4)
    return [notice for notice in run.notices if "zero3" in notice]


def test_notices_tell_of_ranks_without_peers_and_of_stages_that_gather_often() -> None:
    assert notices("parallel.data=4") == []
    (alone,) = notices("parallel.pipeline=4", "schedule.use=1f1b", "model.num_layers=4")
    assert "shards nothing over one data-parallel rank" in alone
    staged = ("parallel.pipeline=2", "schedule.use=1f1b", "train.micro_batch_size=1", "train.global_batch_size=8")
    (often,) = notices(*staged)
    assert "twice in each of 4 microbatches; optimizer.segments_held=0 gathers them once a step" in often
    assert notices(*staged, "optimizer.segments_held=0") == []


@pytest.mark.parametrize("capture", ["partial", "compile"])
def test_captured_graphs_are_refused_by_name(capture: str) -> None:
    line, code = mistake(plugins=["optimizer=zero3", f"graph-capture={capture}"], nproc=2)
    assert line.startswith(f"optimizer=zero3 with graph-capture={capture}: graphs rely on parameters that stay")
    assert code == 2


def test_a_library_that_adds_to_gradients_by_itself_is_refused() -> None:
    line, _ = mistake(plugins=["optimizer=zero3", "parallel-layer=te"], nproc=2)
    assert "optimizer=zero3 with parallel-layer=te: the library adds to gradients by itself" in line
    assert "parallel-layer.fuse_weight_gradients=false" in line


#: Two microbatches for each of two ranks, a dropout that draws, and an evaluation in between.
LITTLE = (
    "train.steps=4",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.sequence_length=8",
    "model.num_layers=3",
    "model.dropout=0.1",
    "eval.interval=2",
    "eval.batches=1",
    "optimizer.bucket_size=1",
)


def asked(optimizer: str, *sets: str) -> Request:
    return Request(configs=("preset:tiny",), sets=(*LITTLE, *sets), plugins=(f"optimizer={optimizer}",), nproc=2)


@pytest.mark.multiproc
def test_with_one_reduction_a_step_it_is_adamw_bit_for_bit() -> None:
    variants = {
        "fp32": (),
        "bf16": ("train.precision=bf16",),
        "16-bit gradients": ("train.precision=bf16", "optimizer.grad_dtype=param"),
        "whole matrices": ("optimizer.rule=muon",),
        "recomputed": ("train.recompute=full",),
    }
    names = ("adamw", "zero3,whole_below=0,reduce=step", "zero3,whole_below=0,reduce=step,segments_held=0")
    found = train_many(2, [asked(name, *sets) for sets in variants.values() for name in names])
    for index, variant in enumerate(variants):
        (whole, *_), *lent = found[3 * index : 3 * index + 3]
        for each, *_ in lent:
            assert (each.losses, each.norms, each.validation) == (whole.losses, whole.norms, whole.validation), variant
            assert each.weights == whole.weights, variant
        assert len({*whole.losses}) == 4
