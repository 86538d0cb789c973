"""What makes a GPU wait in a step: reads of its numbers, and data that is not there yet. Here on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from weakref import ref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_run.errors import PluginError
from megatron_run_engine.optim import flat
from megatron_run_engine.optim.gradients import LateFactors, LateFactorsOfCopies
from megatron_run_engine.training.loader import AHEAD
from tests.support.training_bench import Bench

SMALL = ("model.num_layers=1", "model.hidden_size=16", "train.sequence_length=8", "eval.interval=0", "eval.batches=1")
#: Steps of two microbatches.
SIX = (*SMALL, "train.micro_batch_size=4", "train.steps=6")


class Reads(TorchDispatchMode):
    """Lists ``read`` wherever the host takes a value from a tensor, between what else is put into ``log``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: list[str] = []
        for name in ("tolist", "numpy", "cpu"):  # the others are operations
            monkeypatch.setattr(torch.Tensor, name, self.noted("read", getattr(torch.Tensor, name)))

    def noted(self, what: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.log.append(what)
            return function(*arguments, **named)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            self.log.append("read")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("more", [(), ("train.count_zeros=true", "train.loss_mean=token")], ids=["plain", "counted"])
@pytest.mark.parametrize("on_host", [False, True])
def test_the_host_reads_once_in_a_step_and_before_the_update(
    on_host: bool, precision: str, more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU: on a CPU a norm looks at its values.
    monkeypatch.setattr(flat, "gradients_of", LateFactorsOfCopies if on_host else LateFactors)
    more = (*more, f"optimizer.state_on_host={str(on_host).lower()}")
    bench = Bench(tmp_path, *SIX, f"train.precision={precision}", *more)
    reads, optimizer = Reads(monkeypatch), cast("Any", bench.assembly.optimizer)
    for name in ("zero_grad", "clip_", "step"):
        setattr(optimizer, name, reads.noted(name, getattr(optimizer, name)))
    bench.watch.after_step = lambda: reads.log.append("reported")
    with reads:
        bench.train()
    # Before the first step rank 0 says which are traced, and after the last one an evaluation reads its loss.
    steps = " ".join(reads.log[reads.log.index("zero_grad") :]).split("reported")[:-2]
    assert len(steps) == 5
    assert {" ".join(step.split()) for step in steps} == {"zero_grad clip_ read step"}


def ahead(bench: Bench) -> list[tuple[int, bool]]:
    """Load ahead as on a GPU; returns which samples are read, in order, and whether ahead of their step."""
    loader, read = cast("Any", bench.trainer._loader), list[tuple[int, bool]]()
    loader._ahead = AHEAD
    load, fields, within = loader.load_ahead, loader._fields, [False]

    def load_ahead(*arguments: Any) -> None:
        within[0] = True
        load(*arguments)
        within[0] = False

    def noted(dataset: Any, consumed: int, index: int) -> Mapping[str, torch.Tensor]:
        read.append((consumed + loader._first_sample(index), within[0]))
        return cast("Mapping[str, torch.Tensor]", fields(dataset, consumed, index))

    loader.load_ahead, loader._fields = load_ahead, noted
    return read


def test_a_step_loads_the_data_of_the_next_one(tmp_path: Path) -> None:
    plain, bench = Bench(tmp_path, *SIX), Bench(tmp_path, *SIX)
    read = ahead(bench)
    plain.train()
    bench.train()
    assert [(step.loss, step.grad_norm) for step in bench.watch.steps] == [
        (step.loss, step.grad_norm) for step in plain.watch.steps
    ]
    assert torch.equal(bench.weights(), plain.weights())
    batch = bench.run.config.train.global_batch_size
    assert read == [(sample, sample >= batch) for sample in range(0, 6 * batch, 4)]  # each once, none past the end


def test_a_step_of_many_microbatches_loads_the_first_few_ahead(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *SMALL, "train.micro_batch_size=1", "train.global_batch_size=12", "train.steps=2")
    read = ahead(bench)
    bench.train()
    assert read == [(sample, 12 <= sample < 12 + AHEAD) for sample in range(24)]


def test_what_was_loaded_for_other_samples_is_not_taken(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *SIX)
    loader, dataset = cast("Any", bench.trainer._loader), bench.trainer._dataset
    expected = [loader.training(dataset, 3, 16)(index).fields["tokens"] for index in range(2)]
    ahead(bench)
    for elsewhere in (8, 16):
        loader.load_ahead(dataset, elsewhere, 2)
        found = [loader.training(dataset, 3, 16)(index).fields["tokens"] for index in range(2)]
        assert all(map(torch.equal, found, expected))


def test_what_was_loaded_ahead_is_kept_until_it_is_taken(tmp_path: Path) -> None:
    """Beside those of the next step, a step would have its own microbatches in memory."""
    bench = Bench(tmp_path, *SIX)
    loader, dataset = cast("Any", bench.trainer._loader), bench.trainer._dataset
    ahead(bench)
    loader.load_ahead(dataset, 16, 2)
    tokens = ref(loader.training(dataset, 3, 16)(0).fields["tokens"])
    assert tokens() is None


@pytest.mark.parametrize("on_host", ["false", "true"])
def test_a_rewound_step_loads_its_own_data(on_host: str, tmp_path: Path) -> None:
    """Wherever the state lies that it goes back to."""
    sets = (
        "train.micro_batch_size=4",
        "train.steps=12",
        "guard.spike_window=8",
        "guard.spike=rewind",
        "checkpoint.interval=8",
    )
    plain = Bench(tmp_path, *SMALL, *sets)
    bench = Bench(tmp_path, *SMALL, *sets, f"optimizer.state_on_host={on_host}")
    ahead(bench)
    for each in (plain, bench):
        each.spoil_losses(lambda begun, _, total: total * 9 if begun == 10 else total)
        each.train()
    assert bench.read == plain.read
    assert bench.trainer._progress.rewinds == 1
    assert torch.equal(bench.weights(), plain.weights())


def test_data_that_cannot_be_read_is_said_when_its_step_begins(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *SIX)
    ahead(bench)
    fields = cast("Any", bench.trainer._loader)._fields

    def broken(dataset: Any, consumed: int, index: int) -> Any:
        if consumed == 2 * bench.run.config.train.global_batch_size:
            raise PluginError("sample 16 cannot be read")
        return fields(dataset, consumed, index)

    cast("Any", bench.trainer._loader)._fields = broken
    with pytest.raises(PluginError, match="sample 16 cannot be read"):
        bench.train()
    assert [step.step for step in bench.watch.steps] == [1, 2]
