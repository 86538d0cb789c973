"""DeepSpeed's partitions on two gloo ranks, beside the built-in adamw on the same gradients.

Importing DeepSpeed takes seconds, so one pair of processes finds out everything that these tests ask.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_run.contracts import Optimizer
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.errors import ExitCode
from megatron_run_engine.optim import UpdateOptions
from megatron_run_engine.runtime.comm import create_groups
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_testing.build_contexts import context_at
from tests.plugins.optimizer.optimizer_bench import SHAPES, Bench, Trained, gathered, reader
from tests.support.commands import COMMAND, run_command
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.nightly,  # two processes that each take ten seconds to import DeepSpeed
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed"),
]

STEPS = 20
CLIPS = (0.0, 3.0)
#: Options of DeepSpeed that change what travels and what is kept, never what is learned.
WAYS: dict[str, dict[str, Any]] = {
    "stage 1": {},
    "stage 2": {"stage": 2},
    "buckets smaller than a parameter": {"reduce_bucket_size": 16},
    "to each rank its own": {"use_multi_rank_bucket_allreduce": False},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Update rules besides adamw, with options that both optimizers have.
RULES: dict[str, dict[str, Any]] = {
    "adam": {"rule": "adam", "betas": (0.8, 0.95), "eps": 1e-6},
    "sgd": {"rule": "sgd", "momentum": 0.9, "nesterov": True},
    "a factor for some names": {"lr_mult": ("*second:0.25", "*first*:2")},
}


def adamw(context: BuildContext, **options: Any) -> Optimizer:
    from megatron_run_engine.builtin.optimizer.adamw import megatron_run_create_optimizer

    return megatron_run_create_optimizer(context, UpdateOptions(**options))


def deepspeed(context: BuildContext, **options: Any) -> Optimizer:
    from megatron_run_optimizer_deepspeed import megatron_run_create_optimizer
    from megatron_run_optimizer_deepspeed.rule import Options

    return megatron_run_create_optimizer(context, Options(**options))


BOTH: Mapping[str, Callable[..., Optimizer]] = {"adamw": adamw, "deepspeed": deepspeed}


def everything(rank: int, world: int) -> dict[str, Any]:
    """What the tests below look at."""
    topology = Topology(Sizes(data=world), rank)
    groups = create_groups(topology, timedelta(seconds=20))
    context = partial(context_at, topology, groups)
    fp32 = context(dtype=torch.float32)
    return {
        "trained": {
            (name, clip): trained(context(dtype=dtype), clip) for name, dtype in DTYPES.items() for clip in CLIPS
        },
        "rules": {name: by_rule(fp32, options) for name, options in RULES.items()},
        "planted": {(guilty, name): planted(fp32, guilty, name) for guilty in range(world) for name in SHAPES},
        "zeros": {name: zeros(make, fp32) for name, make in BOTH.items()},
        "state": {name: state(context(dtype=dtype)) for name, dtype in DTYPES.items()},
        "memory": {name: memory(context(dtype=dtype)) for name, dtype in DTYPES.items()},
        "backward": backward(fp32),
    }


def trained(context: BuildContext, clip: float) -> dict[str, Trained]:
    """What adamw comes to, and DeepSpeed in every way."""
    steps = range(1, STEPS + 1)
    ways = {name: Bench(partial(deepspeed, **options), context).train(steps, clip) for name, options in WAYS.items()}
    return {"adamw": Bench(adamw, context).train(steps, clip), **ways}


def by_rule(context: BuildContext, options: dict[str, Any]) -> list[Trained]:
    return [Bench(partial(make, **options), context).train(range(1, 6)) for make in BOTH.values()]


def planted(context: BuildContext, guilty: int, name: str) -> dict[str, Any]:
    """A step that rank ``guilty`` spoils, between two good ones, and the good ones alone."""
    bench, undisturbed = Bench(deepspeed, context), Bench(deepspeed, context)
    bench.step(1)
    before = bench.weights()
    found_inf = bench.reduce(2, (guilty, f".{name}", float("inf")))
    kept = bench.weights()
    return {
        "found_inf": found_inf,
        "before": before,
        "kept": kept,
        "after": bench.train([2]),
        "undisturbed": undisturbed.train([1, 2]),
    }


def zeros(make: Callable[[BuildContext], Optimizer], context: BuildContext) -> float:
    """What is counted where every third value of each parameter is a zero."""
    bench = Bench(make, context)
    bench.optimizer.zero_grad()
    for parameter in bench.infos:
        main_grad(parameter).fill_(1.0).view(-1)[::3] = 0.0
    bench.optimizer.finish_grad_sync()
    return bench.optimizer.count_zeros().item()


def state(context: BuildContext) -> dict[str, Any]:
    """Training that goes on, from the state that either optimizer has given and without a break."""
    found: dict[str, Any] = {}
    for name, make in BOTH.items():
        bench = Bench(make, context)
        bench.train(range(1, 6))
        mine = [piece._replace(tensor=piece.tensor.detach().clone()) for piece in bench.optimizer.iter_state()]
        pieces: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pieces, mine)
        whole = gathered(piece for each in pieces for piece in each)
        resumed = Bench(deepspeed, context)
        resumed.train([11, 12])
        resumed.optimizer.load_state(reader(whole))
        found[name] = {
            "state": {key: tensor.numpy() for key, tensor in whole.items()},
            "went on": bench.train(range(6, 9)).weights,
            "resumed": resumed.train(range(6, 9)).weights,
        }
    return found


def memory(context: BuildContext) -> dict[str, int]:
    """Bytes by role as the optimizer says, and those of all tensors that came to be with it."""
    before = live_bytes()
    bench = Bench(deepspeed, context)
    bench.train([1])
    return {**bench.optimizer.memory(), "live": live_bytes() - before}


def live_bytes() -> int:
    """The storages of all tensors of this process, each once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = [each.untyped_storage() for each in tensors if each.device.type != "meta"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def backward(context: BuildContext) -> list[float]:
    """Gradients of autograd after two backwards of 2x, on parameters that DeepSpeed holds."""
    bench = Bench(deepspeed, context)
    parameter = next(iter(bench.infos))
    for _ in range(2):
        (parameter * 2).sum().backward()
    assert parameter.grad is not None
    return [float(each) for each in parameter.grad.unique()]


@cache
def seen() -> list[dict[str, Any]]:
    """By rank."""
    return run_ranks(everything, 2, timeout=280)


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=str(name))


def test_it_conforms_alone_and_together(tmp_path: Path) -> None:
    """In a process of its own, which DeepSpeed changes for life."""
    done = run_command((*COMMAND, "plugins", "check", "optimizer=deepspeed"), tmp_path)
    assert done.returncode == ExitCode.DONE, done.stdout + done.stderr
    assert "ok  they train as one rank does with the mean gradient" in done.stdout


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_norms_are_those_of_adamw_bit_for_bit(dtype: str, clip: float, way: str) -> None:
    for each in seen():
        outcome = each["trained"][dtype, clip]
        assert_equal(outcome[way].weights, outcome["adamw"].weights)
        assert outcome[way].norms == outcome["adamw"].norms
        assert len(set(outcome[way].norms)) == STEPS
    assert min(seen()[0]["trained"][dtype, clip]["adamw"].norms) > max(CLIPS), "nothing was clipped"


@pytest.mark.parametrize("rule", RULES)
def test_other_rules_and_factors_are_those_of_the_flat_optimizers(rule: str) -> None:
    for each in seen():
        ours, theirs = each["rules"][rule]
        assert_equal(ours.weights, theirs.weights)
        plain = each["trained"]["fp32", 0.0]["adamw"].weights
        assert any((ours.weights[name] != plain[name]).any() for name in plain)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("guilty", [0, 1])
def test_a_value_that_is_not_finite_on_one_rank_skips_the_step_on_all(guilty: int, name: str) -> None:
    for each in seen():
        found = each["planted"][guilty, name]
        assert found["found_inf"] > 0
        assert_equal(found["kept"], found["before"])
        assert_equal(found["after"].weights, found["undisturbed"].weights)


def test_zeros_are_counted_once() -> None:
    expected = sum(-(-np.prod(shape) // 3) for shape in SHAPES.values())
    assert [each["zeros"] for each in seen()] == [{"adamw": expected, "deepspeed": expected}] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_is_that_of_adamw(dtype: str) -> None:
    found = seen()[0]["state"][dtype]
    assert_equal(found["deepspeed"]["state"], found["adamw"]["state"])
    assert {field for _, field in found["deepspeed"]["state"]} == {"master", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("source", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_training_goes_on_from_saved_state_as_without_a_break(dtype: str, source: str) -> None:
    for each in seen():
        found = each["state"][dtype][source]
        assert_equal(found["resumed"], found["went on"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_what_the_tensors_take(dtype: str) -> None:
    for each in seen():
        said = dict(each["memory"][dtype])
        assert said.pop("live") - sum(said.values()) in (0, 4), said  # DeepSpeed keeps the norm of its last step


def test_no_hook_of_deepspeed_takes_gradients_away() -> None:
    assert [each["backward"] for each in seen()] == [[4.0], [4.0]]
