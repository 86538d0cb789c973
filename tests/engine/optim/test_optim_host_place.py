"""Masters and state in host memory: the bits of an update on the device, and copies that are as late as they may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_run.contracts import Optimizer
from megatron_run.errors import Problems
from megatron_run.planning import load_config
from megatron_run_engine.builtin.optimizer.adamw import megatron_run_create_optimizer
from megatron_run_engine.optim import UpdateOptions, flat, host_place
from megatron_run_engine.optim.gradients import LateFactorsOfCopies
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_testing.build_contexts import on_device, single_process_context
from megatron_run_testing.optimizer import optimizer_checks
from megatron_run_testing.optimizer.bench import Bench as SmallBench
from megatron_run_testing.optimizer.bench import gradients as small_gradients
from tests.contracts.conformance import failures
from tests.plugins.optimizer.optimizer_bench import Bench, gathered, reader
from tests.support.late_copies import LateCopies

#: A bucket for each parameter: five.
BUCKETS = 5
RULES: Mapping[str, Mapping[str, Any]] = {
    "adamw": {},
    "adam": {"rule": "adam", "lr_mult": ("first*:0.5",)},
    "sgd": {"rule": "sgd", "momentum": 0.9, "nesterov": True},
    "muon": {"rule": "muon"},
    "16-bit gradients": {"grad_dtype": "param"},
    "one bucket": {"bucket_size": 10**6},
    "of the user's": {"rule": "torch.optim:NAdam"},
}


class Copies:
    """Late copies in the place of those that optimizers make from now on, with one log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.made: list[LateCopies] = []
        names = iter(("out", "few", "back"))
        monkeypatch.setattr(host_place, "make_copies", lambda _, to_host: self._late(next(names), to_host=to_host))

    def _late(self, name: str, *, to_host: bool) -> LateCopies:
        self.made.append(LateCopies(name, self.log, to_host=to_host))
        return self.made[-1]

    def taken(self) -> list[str]:
        """What happened since the last call."""
        found = self.log[:]
        self.log.clear()
        return found


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """No copy writes to memory that somebody else may have by then."""
    made = Copies(monkeypatch)
    yield made
    assert made.made
    assert not any(each.lost for each in made.made)


def create(options: UpdateOptions, context: BuildContext) -> Optimizer:
    return megatron_run_create_optimizer(context, options)


def bench(dtype: torch.dtype = torch.float32, *, on_host: bool, **options: Any) -> Bench:
    chosen = UpdateOptions(**{"bucket_size": 1, "state_on_host": on_host, **options})
    return Bench(partial(create, chosen), single_process_context(dtype=dtype))


def state(made: Bench) -> dict[tuple[str, str], Tensor]:
    return {key: each.clone() for key, each in gathered(made.optimizer.iter_state()).items()}


def assert_equal(one: Bench, other: Bench) -> None:
    """Parameters, masters and state, bit for bit."""
    first, second = state(one), state(other)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    for parameter, same in zip(one.infos, other.infos, strict=True):
        assert torch.equal(parameter, same)


def scaled_step(made: Bench, step: int, scale: float, clip: float) -> float:
    """A step whose gradients are unscaled by 1 / ``scale``; the norm."""
    made.reduce(step)
    made.optimizer.unscale_(torch.full((1,), 1 / scale))
    norm = made.optimizer.clip_(clip).item()
    made.optimizer.step(1e-2, 0.1)
    made.optimizer.start_param_sync()
    made.optimizer.ensure_ready(made.infos)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_late_copies_change_no_bit(rule: str, dtype: torch.dtype, copies: Copies) -> None:
    """Scales that are no powers of two, clipped and not."""
    plain, made = (bench(dtype, on_host=on_host, **RULES[rule]) for on_host in (False, True))
    for step, clip in enumerate((0.5, 0.0, 1e6), start=1):
        assert scaled_step(made, step, 3.0, clip) == scaled_step(plain, step, 3.0, clip)
        assert plain.optimizer.count_zeros() == made.optimizer.count_zeros()
    assert_equal(plain, made)
    assert copies.log


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_leaves_nothing_behind(dtype: torch.dtype, copies: Copies) -> None:
    """Not all gradients of the second step are finite: they are on their way to the host when it is skipped."""
    plain, made = (bench(dtype, on_host=on_host) for on_host in (False, True))
    for each in (plain, made):
        each.step(1, 0.5)
        assert each.reduce(2, planted=(0, next(iter(each.infos.values())).name, float("inf"))) == 1.0
        each.optimizer.clip_(0.5)
        each.step(3, 0.5)
    assert_equal(plain, made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [False, True], ids=["from the device", "to the device"])
def test_a_state_goes_on_in_the_other_place(before: bool, dtype: torch.dtype, copies: Copies) -> None:
    plain, begun, ended = (bench(dtype, on_host=on_host) for on_host in (False, before, not before))
    plain.train((1, 2, 3, 4), 0.5)
    begun.train((1, 2), 0.5)
    ended.reduce(9, planted=(0, next(iter(ended.infos.values())).name, float("nan")))  # on its way when it is given up
    ended.optimizer.load_state(reader(state(begun)))
    ended.train((3, 4), 0.5)
    assert_equal(plain, ended)


def test_copies_run_beside_the_backward_and_beside_the_update(copies: Copies) -> None:
    """The gradients of a bucket leave when they are complete, and its values before those of the next one are made."""
    made = bench(torch.bfloat16, on_host=True)
    made.step(1)
    copies.taken()
    optimizer = made.optimizer
    optimizer.zero_grad()
    assert copies.taken() == ["out waits"]
    for sent, parameter in enumerate(reversed(made.infos), start=1):
        main_grad(parameter).fill_(1.0)
        optimizer.grad_ready(parameter)
        assert copies.log == ["out starts"] * sent
    assert sent == BUCKETS
    optimizer.finish_grad_sync()
    optimizer.unscale_(torch.ones(1))
    optimizer.clip_(1.0)
    assert copies.taken() == ["out starts"] * BUCKETS, "the norm waits for no copy"
    optimizer.step(0.1, 0.1)
    update = ["out ends", "back starts"] * BUCKETS
    assert copies.taken() == ["back ends", "few starts", "few ends", *update, "back waits"]
    optimizer.start_param_sync()
    assert copies.taken() == []


def test_state_is_made_and_read_when_nothing_is_under_way(copies: Copies) -> None:
    """Before the first update saving makes the rule's state by a step with gradients of zero."""
    made = bench(torch.bfloat16, on_host=True)
    assert made.reduce(1, planted=(0, next(iter(made.infos.values())).name, float("inf"))) == 1.0
    copies.taken()
    saved = state(made)
    assert copies.taken() == ["out ends"]
    made.optimizer.load_state(reader(saved))
    assert copies.taken() == ["out ends", "back starts", "back waits"]


def test_what_the_model_moves_itself_stays_moved(copies: Copies) -> None:
    """As biases of routers: the host's masters would otherwise bring back the old value."""
    made = bench(on_host=True, bucket_size=10**6)
    parameter = list(made.infos)[1]
    shard = made.optimizer._shards[0]  # type: ignore[attr-defined]
    shard.bucket.infos[parameter] = replace(shard.bucket.infos[parameter], moved=True, decay=False)
    made.reduce(1)
    shard.bucket.view(shard.bucket.grad, parameter).zero_()
    with torch.no_grad():
        parameter.fill_(7.0)
    copies.taken()
    made.optimizer.step(0.0, 0.0)
    assert (parameter == 7.0).all()
    (shard,) = made.optimizer._shards  # type: ignore[attr-defined]
    assert (shard.masters[shard.bucket.starts[parameter] :][: parameter.numel()] == 7.0).all()


@pytest.mark.parametrize("grad_dtype", ["main", "param"])
def test_late_factors_reach_the_host(grad_dtype: Any, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: one factor, and norms of gradients that nobody has multiplied."""
    plain = bench(torch.bfloat16, on_host=False, grad_dtype=grad_dtype)
    monkeypatch.setattr(flat, "gradients_of", LateFactorsOfCopies)
    made = bench(torch.bfloat16, on_host=True, grad_dtype=grad_dtype)
    assert isinstance(made.optimizer._gradients, LateFactorsOfCopies)  # type: ignore[attr-defined]
    for step, clip in enumerate((0.5, 0.0, 0.25), start=1):
        norms = [scaled_step(each, step, 8.0, clip) for each in (plain, made)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    expected = state(plain)
    for key, found in state(made).items():
        torch.testing.assert_close(found, expected[key], rtol=1e-5, atol=1e-7)


def test_memory_is_told_by_place() -> None:
    """Of bf16 parameters with 16-bit gradients: the host has these too, and what the device had before."""
    plain, made = (bench(torch.bfloat16, on_host=on_host, grad_dtype="param") for on_host in (False, True))
    for each in (plain, made):
        each.step(1)
    before, found = plain.optimizer.memory(), made.optimizer.memory()
    assert found == {
        "parameters": before["parameters"],
        "gradients": before["gradients"],
        "host_masters": before["masters"],
        "host_main_gradients": before["main_gradients"] + before["gradients"],
        "host_state": before["state"],
    }
    fp32 = bench(on_host=True)
    fp32.step(1)
    held = fp32.optimizer.memory()
    assert held["host_masters"] == held["host_main_gradients"] == held["parameters"] == held["gradients"]


@pytest.mark.parametrize(
    ("sets", "plugins", "what"),
    [
        (("optimizer.rule=muon", "parallel.tensor=2"), ("parallel-layer=tensor",), "parallel.tensor=2 cuts matrices"),
        (("optimizer.rule_options={capturable: true}",), (), "capturable"),
        ((), ("optimizer=deepspeed",), "optimizer.state_on_host"),
    ],
)
def test_rules_that_need_the_device_are_refused(sets: tuple[str, ...], plugins: tuple[str, ...], what: str) -> None:
    with pytest.raises(Problems, match=what):
        load_config("preset:tiny", sets=("optimizer.state_on_host=true", *sets), plugins=plugins)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", ["main", "param"])
def test_a_gpu_keeps_parameters_and_gradients_alone(grad_dtype: Any, dtype: torch.dtype) -> None:
    """The contract holds there, and the values are those of an update on the GPU, to rounding."""
    made, plain = (partial(create, UpdateOptions(state_on_host=each, grad_dtype=grad_dtype)) for each in (True, False))
    with on_device("cuda"):
        assert failures(optimizer_checks(made)) == {}
        found, expected = (SmallBench(each, single_process_context(dtype=dtype)) for each in (made, plain))
    for step in range(4):
        norms = [each.step(small_gradients(step), max_norm=0.5) for each in (found, expected)]
        torch.testing.assert_close(*norms)
    (shard,) = found.optimizer._shards  # type: ignore[attr-defined]
    assert {each.device.type for each in (shard.masters, shard.arrived, shard.grads)} == {"cpu"}
    assert shard.arrived.is_pinned()
    assert {piece.tensor.device.type for piece in found.optimizer.iter_state()} == {"cpu"}
    for one, other in zip(found.optimizer.iter_state(), expected.optimizer.iter_state(), strict=True):
        torch.testing.assert_close(one.tensor, other.tensor.cpu(), rtol=1e-5, atol=1e-7)
