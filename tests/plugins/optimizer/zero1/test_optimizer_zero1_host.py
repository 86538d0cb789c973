"""State in host memory: whole runs with and without it are equal bit for bit, and go on from each other's steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_run.planning import load_config
from megatron_run_cli.reports import dry_run
from megatron_run_cli.reports.dry_run import dry_run_json
from tests.plugins.optimizer.optimizer_runs import Case, Held, Planted, run_cases, state_of
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.resuming import SMALL, attempt
from tests.support.training import kept_groups

LITTLE = (
    "train.sequence_length=8",
    "train.steps=4",
    "train.lr_warmup=0",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.clip_norm=0.5",
    "model.num_layers=2",
    "optimizer.bucket_size=3000",
)
FP16 = ("train.precision=fp16", "scaler.initial_loss_scale=1024", "scaler.hysteresis=1")
VARIANTS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16": ("train.precision=bf16",),
    "16-bit gradients": ("train.precision=bf16", "optimizer.grad_dtype=param"),
    "fp16, overflows": FP16,
    "whole matrices": ("optimizer.rule=muon", "train.precision=bf16"),
    "momentum, not clipped": ("optimizer.rule=sgd", "optimizer.momentum=0.9", "train.clip_norm=0"),
    "sent at the end": ("optimizer.overlap_grad_reduce=false",),
    "biases that the model moves": (
        "model.experts.count=4",
        "model.experts.ffn_size=16",
        "model.experts.aux_loss_coeff=0",
        "model.experts.router.bias_rate=0.05",
        "model.experts.router.score_function=sigmoid",
    ),
}
ON_HOST = "optimizer.state_on_host=true"
HELD = {"host_masters", "host_main_gradients", "host_state"}


def case(optimizer: str, variant: str, *more: str) -> Case:
    """Of fp16, the gradients of the first and of the third step overflow."""
    chosen = {each.partition("=")[0]: each for each in (*LITTLE, *VARIANTS[variant], *more)}  # the last one counts
    planted = (Planted(0, step=1, where=0.2), Planted(0, step=3, where=0.7)) if "fp16" in variant else ()
    return Case(tuple(chosen.values()), (f"optimizer={optimizer}",), planted)


def assert_same(plain: list[Held], found: list[Held]) -> None:
    for one, other in zip(plain, found, strict=True):
        assert other.losses == one.losses
        np.testing.assert_array_equal(other.norms, one.norms)
        assert (other.found_inf, other.scales, other.weights) == (one.found_inf, one.scales, one.weights)
        assert other.storages == sum(other.memory.values())
        assert other.memory.keys() >= HELD
        assert one.memory.keys().isdisjoint(HELD)
    first, second = state_of(plain), state_of(found)
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[key], err_msg=str(key))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("optimizer", "world"),
    [
        pytest.param("adamw", 1, marks=pytest.mark.nightly),
        ("zero1", 2),
        pytest.param("adamw", 2, marks=pytest.mark.nightly),
    ],
)
def test_it_changes_no_bit_of_a_run(optimizer: str, world: int) -> None:
    runs = run_cases(world, [case(optimizer, variant, *more) for variant in VARIANTS for more in ((), (ON_HOST,))])
    for index, variant in enumerate(VARIANTS):
        plain, found = runs[2 * index : 2 * index + 2]
        assert plain[0].found_inf == [variant.startswith("fp16") and step in (0, 2) for step in range(4)]
        try:
            assert_same(plain, found)
        except AssertionError as error:
            raise AssertionError(f"{variant}: {error}") from error


@pytest.mark.multiproc
@pytest.mark.parametrize("variant", ["fp32", "bf16", "16-bit gradients"])
def test_a_dry_run_tells_what_a_rank_holds(variant: str) -> None:
    (ranks,) = run_cases(2, [case("zero1", variant, ON_HOST)])
    sets = case("zero1", variant, ON_HOST).sets
    with mock.patch.object(dry_run, "_step_memory", return_value=None):  # it counts for seconds what nobody reads here
        planned = dry_run_json(load_config("preset:tiny", plugins=["optimizer=zero1"], sets=sets, nproc=2))
    assert planned["memory_by_stage"][0] == ranks[0].memory
    on_device = sum(held for role, held in ranks[0].memory.items() if role not in HELD)
    assert planned["memory"]["tensors_by_stage"][0] >= on_device
    assert HELD.isdisjoint(planned["memory"]["by_stage"][0])


STEPS, STOP = 5, 2
SETS: dict[str, Any] = {**SMALL, "train.steps": STEPS, "train.precision": "bf16", "optimizer.bucket_size": 1}


def change(rank: int, world: int, root: str) -> list[dict[int, dict[str, Any]]]:
    """An undisturbed run, and those that begin in one place and end in the other; each saves beside its training."""
    with found_once(), kept_groups():
        where: dict[str, Any] = {"rank": rank, "world": world}
        places = [{**SETS, "checkpoint.async_save": True, "optimizer.state_on_host": each} for each in (False, True)]
        found = [attempt(Path(root) / "whole", SETS, ("optimizer=zero1",), **where).numbers]
        for name, (first, second) in {"out": places, "back": places[::-1]}.items():
            folder = Path(root) / name
            begun = attempt(folder, first, ("optimizer=zero1",), stop_after=STOP, **where)
            ended = attempt(folder, second, ("optimizer=zero1",), number=2, **where)
            assert ended.first == STOP + 1
            found.append({**begun.numbers, **ended.numbers})
        return found


@pytest.mark.multiproc
def test_a_run_goes_on_with_its_state_in_the_other_place(tmp_path: Path) -> None:
    (whole, *changed), _ = run_ranks(change, 2, str(tmp_path), timeout=200)
    assert sorted(whole) == [*range(1, STEPS + 1)]
    assert changed == [whole, whole]
