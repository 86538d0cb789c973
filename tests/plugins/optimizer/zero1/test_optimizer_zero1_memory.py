"""Bytes a parameter as promised: what a rank really holds, what the optimizer says, and what a dry run prints."""

from __future__ import annotations

import pytest

from megatron_run.planning import load_config
from megatron_run_cli.reports import dry_run
from megatron_run_cli.reports.dry_run import dry_run_json, dry_run_text
from tests.plugins.optimizer.optimizer_runs import Case, Held, run_cases

#: By row of the table: settings, bytes of a parameter, and those that every rank holds and those that are shared.
ROWS = {
    "16-bit parameters and gradients": (("train.precision=bf16", "optimizer.grad_dtype=param"), 2, 4, 16),
    "16-bit parameters, fp32 gradients": (("train.precision=bf16",), 2, 6, 12),
    "fp32": (("train.precision=fp32",), 4, 8, 8),
}
OPTIMIZERS = ("adamw", "zero1")
COMMON = (
    "train.steps=1",
    "train.sequence_length=8",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    "optimizer.bucket_size=3000",
)


@pytest.fixture(autouse=True)
def parameters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run counts activations for seconds, and nobody reads them here."""
    monkeypatch.setattr(dry_run, "_step_memory", lambda *_: None)


def assert_as_promised(optimizer: str, row: str, ranks: list[Held]) -> None:
    sets, width, each, shared = ROWS[row]
    data = len(ranks)
    run = load_config("preset:tiny", plugins=[f"optimizer={optimizer}"], sets=[*COMMON, *sets], nproc=data)
    planned = dry_run_json(run)
    (parameters,), (padding,) = planned["parameters_by_stage"], planned["padding_by_stage"]
    assert ranks[0].memory == planned["memory_by_stage"][0]
    for held in ranks:
        assert held.storages == sum(held.memory.values())
        padded, rest = divmod(held.memory["parameters"], width)
        assert rest == 0
        steps = held.memory["state"] % 256  # a count of 4 bytes for each group of a bucket, 3 at most of 17 buckets
        assert 0 < steps <= 4 * 3 * 17
        expected = each * padded + shared * padded // (data if optimizer == "zero1" else 1)
        assert sum(held.memory.values()) == expected + steps
        assert parameters + padding <= padded < (parameters + padding) * 1.3 + 64 * data * 17


@pytest.mark.multiproc
@pytest.mark.parametrize("data", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_bytes_a_parameter_are_those_of_the_table(data: int) -> None:
    kinds = [(optimizer, row) for optimizer in OPTIMIZERS for row in ROWS]
    runs = run_cases(data, [Case((*COMMON, *ROWS[row][0]), (f"optimizer={optimizer}",)) for optimizer, row in kinds])
    for (optimizer, row), ranks in zip(kinds, runs, strict=True):
        assert_as_promised(optimizer, row, ranks)


@pytest.mark.parametrize("preset", ["tiny", "laptop", "scaling-1.2b", "scaling-8.3b"])
@pytest.mark.parametrize("row", ROWS)
def test_a_dry_run_tells_the_bytes_of_every_preset(preset: str, row: str) -> None:
    sets, width, each, shared = ROWS[row]
    ranks = load_config(f"preset:{preset}").sizes.world
    small = ("train.global_batch_size=128", "model.num_layers=4")  # bytes of a parameter do not ask for all layers
    run = load_config(f"preset:{preset}", plugins=["optimizer=zero1"], sets=[*sets, *small], nproc=4 * ranks)
    (memory,) = dry_run_json(run)["memory_by_stage"]
    padded, total = memory["parameters"] // width, sum(memory.values())
    assert 0 < total - padded * (each + shared / 4) < 4 * 3 * 200
    told = f"{total / 2**30:,.1f} GiB" if total >= 2**30 else f"{total / 2**20:,.1f} MiB"
    assert f"stage 0: {told}" in dry_run_text(run)
