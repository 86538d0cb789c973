"""The suite of kind optimizer notices one that breaks the contract: a broken optimizer for each promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch

from megatron_run.contracts import MASTER, Optimizer
from megatron_run_engine.builtin.optimizer.adamw import megatron_run_create_optimizer
from megatron_run_engine.optim import UpdateOptions
from megatron_run_engine.optim.sharding import give_values
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing import Check
from megatron_run_testing.optimizer import optimizer_checks
from tests.contracts.conformance import failures

#: What is changed about the built-in optimizer; the original method comes first.
Change = Callable[..., Any]


def broken(context: BuildContext, method: str, change: Change) -> Optimizer:
    """The built-in optimizer but for one method."""
    optimizer = megatron_run_create_optimizer(context, UpdateOptions())
    setattr(optimizer, method, partial(change, optimizer, getattr(optimizer, method)))
    return optimizer


def the_check(
    promise: str, method: str = "zero_grad", change: Change | None = None, ranks: tuple[int, ...] = (1,)
) -> Check:
    """The check of ``promise`` on the built-in optimizer, changed if there is a change."""
    create = partial(broken, method=method, change=change or unchanged)
    return {check.name: check for check in optimizer_checks(create, ranks=ranks)}[promise]


def unchanged(optimizer: Any, original: Change, *arguments: Any) -> Any:
    return original(*arguments)


def forgets_to_clear(optimizer: Any, zero_grad: Change) -> None:
    optimizer._reducer.start_step()


def scales_twice(optimizer: Any, send: Change, bucket: Any) -> Any:
    bucket.grad.mul_(optimizer._grad_scale)
    return send(bucket)


def sends_again(optimizer: Any, start_grad_sync: Change, chunk: int) -> None:
    for bucket in optimizer._buckets:
        bucket.grad.mul_(optimizer._grad_scale)
    start_grad_sync(chunk)


def looks_at_the_first_only(optimizer: Any, unscale: Change, factor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = unscale(factor)
    return found * float(not optimizer._shards[0].grads[0].isfinite())


def clips_to_nothing(optimizer: Any, clip: Change, max_norm: float) -> Any:
    return clip(max_norm / 2)


def counts_padding(optimizer: Any, count: Change) -> torch.Tensor:
    return sum(((share.grads == 0).sum() for share in optimizer._shards), torch.zeros(1))


def climbs(optimizer: Any, step: Change, lr: float, weight_decay: float) -> None:
    step(-lr, -weight_decay)


def decays_everything(optimizer: Any, step: Change, lr: float, weight_decay: float) -> None:
    step(lr, weight_decay)
    for share in optimizer._shards:
        share.masters.mul_(1 - lr * weight_decay)
    give_values(optimizer._shards)


def forgets_masters(optimizer: Any, step: Change, lr: float, weight_decay: float) -> None:
    for share in optimizer._shards:
        share.masters.copy_(share.values)
    step(lr, weight_decay)


def forgets_the_state(optimizer: Any, memory: Change) -> dict[str, int]:
    return {**memory(), "state": 4 * len(optimizer._buckets) if optimizer._device.type == "meta" else 0}


def tells_of_padding(optimizer: Any, memory: Change) -> dict[str, int]:
    return {**memory(), "padding": 64}


def drops_the_moments(optimizer: Any, iter_state: Change) -> Any:
    return (piece._replace(tensor=piece.tensor * (piece.field == MASTER)) for piece in iter_state())


def gives_twice(optimizer: Any, iter_state: Change) -> Any:
    return (piece for _ in range(2) for piece in iter_state())


def forgets_nothing(optimizer: Any, load_weights: Change, read: Any) -> None:
    for update in optimizer._updates:
        update.drop_state = lambda: None
    load_weights(read)


def fails_without_parameters(optimizer: Any, clip: Change, max_norm: float) -> Any:
    norm = clip(max_norm)
    return norm if optimizer._shards else norm + 1


PROMISES: dict[str, tuple[str, Change]] = {
    "main_grad keeps its storage and is cleared by zero_grad": ("zero_grad", forgets_to_clear),
    "gradients are multiplied by grad_scale once": ("_send", scales_twice),
    "start_grad_sync is idempotent": ("start_grad_sync", sends_again),
    "unscale_ multiplies and finds non-finite values": ("unscale_", looks_at_the_first_only),
    "clip_ returns the norm and clips to it": ("clip_", clips_to_nothing),
    "count_zeros counts every zero and no padding": ("count_zeros", counts_padding),
    "step moves against the gradient": ("step", climbs),
    "weight decay shrinks matrices and leaves biases": ("step", decays_everything),
    "small updates of 16-bit parameters are not lost": ("step", forgets_masters),
    "memory reports bytes by role, planned and real": ("memory", tells_of_padding),
    "a new optimizer continues from saved state bit for bit": ("iter_state", drops_the_moments),
    "load_weights starts as before the first step": ("load_weights", forgets_nothing),
    "the state of all ranks holds every value once": ("iter_state", gives_twice),
    "a stage without parameters works": ("clip_", fails_without_parameters),
}


def keeps_the_first_rates(optimizer: Any, step: Change, lr: float, weight_decay: float) -> None:
    optimizer.rates = getattr(optimizer, "rates", (lr, weight_decay))
    step(*optimizer.rates)


def keeps_the_first_decay(optimizer: Any, step: Change, lr: float, weight_decay: float) -> None:
    optimizer.decay = getattr(optimizer, "decay", weight_decay)
    step(lr, optimizer.decay)


def leaves_the_parameters(optimizer: Any, load_state: Change, read: Any) -> None:
    before = [share.values.clone() for share in optimizer._shards]
    load_state(read)
    for share, values in zip(optimizer._shards, before, strict=True):
        if share.has_masters:
            share.values.copy_(values)


def saves_rounded_masters(optimizer: Any, iter_state: Change) -> Any:
    dtype = optimizer._buckets[0].parameters[0].dtype
    for piece in iter_state():
        yield piece._replace(tensor=piece.tensor.to(dtype).float()) if piece.field == MASTER else piece


def sends_every_chunk(optimizer: Any, start_grad_sync: Change, chunk: int) -> None:
    for bucket in optimizer._buckets:
        if bucket.chunk is not None:
            start_grad_sync(bucket.chunk)


def sends_its_neighbours(optimizer: Any, grad_ready: Change, parameter: Any) -> None:
    grad_ready(parameter)
    optimizer._reducer.flush(optimizer._bucket_of[parameter].chunk)


ROUND_TRIP = "a new optimizer continues from saved state bit for bit"
IN_BF16 = "so does that of parameters in bf16, unrounded"
RATES = "each step takes its own lr and weight decay"
CHUNKS = "gradients of two chunks leave when they are complete"
#: Further ways to break a promise, which one rank shows.
MORE: tuple[tuple[str, str, Change], ...] = (
    (RATES, "step", keeps_the_first_rates),
    (RATES, "step", keeps_the_first_decay),
    (ROUND_TRIP, "load_state", leaves_the_parameters),
    (ROUND_TRIP, "iter_state", saves_rounded_masters),
    ("load_weights starts as before the first step", "load_weights", leaves_the_parameters),
    (IN_BF16, "load_state", leaves_the_parameters),
    (IN_BF16, "iter_state", saves_rounded_masters),
    (CHUNKS, "start_grad_sync", sends_every_chunk),
    (CHUNKS, "grad_ready", sends_its_neighbours),
)


@pytest.mark.parametrize(("promise", "method", "change"), MORE)
def test_another_way_to_break_a_promise_fails_its_check_too(promise: str, method: str, change: Change) -> None:
    assert failures([the_check(promise, method, change)])
    assert not failures([the_check(promise)])


@pytest.mark.parametrize("promise", PROMISES)
def test_an_optimizer_that_breaks_one_promise_fails_the_check_of_that_promise(promise: str) -> None:
    assert failures([the_check(promise, *PROMISES[promise])])
    assert not failures([the_check(promise)])


def test_memory_that_is_planned_otherwise_is_noticed() -> None:
    promise = "memory reports bytes by role, planned and real"
    assert "on the meta device" in failures([the_check(promise, "memory", forgets_the_state)])[promise]


def test_what_fails_says_what_was_found_and_what_was_expected() -> None:
    promise = "clip_ returns the norm and clips to it"
    found = failures([the_check(promise, "clip_", clips_to_nothing)])
    assert found == {promise: "the norm after clip_(26.4244) is 13.2122, expected 26.4244"}


def drifts(optimizer: Any, step: Change, lr: float, weight_decay: float) -> None:
    step(lr * (1 + optimizer._topology.data_rank), weight_decay)


def learns_from_the_first_rank(optimizer: Any, send: Change, bucket: Any) -> Any:
    bucket.grad.mul_(float(optimizer._topology.data_rank == 0))
    return send(bucket)


def counts_on_every_rank(optimizer: Any, clip: Change, max_norm: float) -> torch.Tensor:
    squares = sum((share.grads.square().sum() for share in optimizer._shards), torch.zeros(1))
    clip(max_norm)
    return cast("torch.Tensor", optimizer._groups.sum_(squares, "world").sqrt())


def keeps_it_to_itself(optimizer: Any, unscale: Change, factor: torch.Tensor) -> torch.Tensor:
    unscale(factor)
    mine = [share.grads[share.owned.start : share.owned.stop] for share in optimizer._shards]
    return torch.tensor([float(any(not grads.isfinite().all() for grads in mine))])


def gives_all_of_it(optimizer: Any, iter_state: Change) -> Any:
    for share in optimizer._shards:
        share.owned = share.updated
    return iter_state()


def looks_at_its_stage_only(optimizer: Any, unscale: Change, factor: torch.Tensor) -> torch.Tensor:
    unscale(factor)
    found = float(any(not share.grads.isfinite().all() for share in optimizer._shards))
    return cast("torch.Tensor", optimizer._groups.max_(torch.tensor([found]), "data"))


def changes_the_infos(attach: Change, chunks: Any, infos: Any, grad_scale: float, **changes: Any) -> None:
    attach(chunks, [{p: replace(info, **changes) for p, info in each.items()} for each in infos], grad_scale)


def sums_no_parts(optimizer: Any, attach: Change, *arguments: Any) -> None:
    changes_the_infos(attach, *arguments, partial_over=None)


def counts_every_copy(optimizer: Any, attach: Change, *arguments: Any) -> None:
    changes_the_infos(attach, *arguments, counted=True)


STAGES = "stages sum and count what they share once"
TOGETHER: dict[str, tuple[str, Change]] = {
    "data-parallel ranks hold equal parameters": ("step", drifts),
    "they train as one rank does with the mean gradient": ("_send", learns_from_the_first_rank),
    "norm and zeros count every value once": ("clip_", counts_on_every_rank),
    "an overflow on one rank is reported on all": ("unscale_", keeps_it_to_itself),
    "the state of all ranks holds every value once": ("iter_state", gives_all_of_it),
}


#: What only ranks on several stages show.
ON_STAGES: tuple[tuple[str, str, Change], ...] = (
    ("an overflow on one stage is reported on all", "unscale_", looks_at_its_stage_only),
    (STAGES, "attach", sums_no_parts),
    (STAGES, "attach", counts_every_copy),
)


@pytest.mark.multiproc
@pytest.mark.parametrize(("promise", "method", "change"), ON_STAGES)
def test_stages_that_break_one_promise_fail_the_check_of_that_promise(
    promise: str, method: str, change: Change
) -> None:
    assert failures([the_check(promise, method, change, ranks=(2,))])[promise].startswith("on 2 ranks: ")
    assert not failures([the_check(promise, method, change)]), "one rank alone shows it"


@pytest.mark.multiproc
@pytest.mark.parametrize("promise", TOGETHER)
def test_ranks_that_break_one_promise_fail_the_check_of_that_promise(promise: str) -> None:
    assert failures([the_check(promise, *TOGETHER[promise], ranks=(2,))])[promise].startswith("on 2 ranks: ")
    assert not failures([the_check(promise, *TOGETHER[promise])]), "one rank alone shows it"
