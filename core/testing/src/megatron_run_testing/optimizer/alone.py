"""Promises of every optimizer and every update rule on one rank."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from megatron_run.contracts import MASTER
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_testing import CheckFailed
from megatron_run_testing.build_contexts import current_device, single_process_context
from megatron_run_testing.optimizer.bench import COLUMNS, ROWS, Bench, OptimizerFactory, SavedState, gradients

#: Types of parameters in which state is saved and loaded.
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
#: The roles that ``memory`` may report.
_UPDATED = {"masters", "main_gradients", "state"}
_ROLES = {"parameters", "gradients", "lent", *_UPDATED, *(f"host_{role}" for role in _UPDATED)}


def check_storage(factory: OptimizerFactory) -> None:
    """``main_grad`` keeps its storage and is cleared by ``zero_grad``."""
    bench = Bench(factory)
    address = main_grad(bench.weight).data_ptr()
    for step in range(3):
        bench.step(gradients(step))
        bench.optimizer.zero_grad()
        if main_grad(bench.weight).data_ptr() != address:
            raise CheckFailed(f"step {step}: main_grad of weight moved to another storage")
        if main_grad(bench.weight).any() or main_grad(bench.bias).any():
            raise CheckFailed(f"step {step}: zero_grad left values in main_grad")


def check_grad_scale(factory: OptimizerFactory) -> None:
    """Gradients are multiplied by ``grad_scale`` once."""
    bench = Bench(factory, grad_scale=0.25)
    bench.reduce(8.0, 8.0)
    expect("main_grad of 8.0 reduced with grad_scale 0.25", main_grad(bench.weight), 2.0)


def check_idempotent(factory: OptimizerFactory) -> None:
    """``start_grad_sync`` may be called again."""
    bench = Bench(factory, grad_scale=0.5)
    bench.optimizer.zero_grad()
    main_grad(bench.weight).fill_(4.0)
    for _ in range(3):
        bench.optimizer.start_grad_sync(0)
    bench.optimizer.finish_grad_sync()
    expect("main_grad after start_grad_sync three times", main_grad(bench.weight), 2.0)


def check_unscale(factory: OptimizerFactory) -> None:
    """``unscale_`` multiplies, and finds non-finite values."""
    bench = Bench(factory)
    bench.reduce(8.0, 8.0)
    found = bench.optimizer.unscale_(0.5 * bench.one)
    if found.item():
        raise CheckFailed(f"found_inf is {found.item()} for finite gradients, expected 0")
    norm = 4.0 * (ROWS * COLUMNS + ROWS) ** 0.5
    expect("the norm of gradients of 8.0 unscaled by 0.5", bench.optimizer.clip_(0.0), norm)
    for value in (float("inf"), float("nan")):
        bias = torch.zeros(ROWS)
        bias[3] = value
        bench.reduce(1.0, bias)
        if not bench.optimizer.unscale_(bench.one).item():
            raise CheckFailed(f"found_inf is 0 although a gradient holds {value}")


def check_clip(factory: OptimizerFactory) -> None:
    """``clip_`` returns the norm before clipping, and clips to the given one."""
    norm = (ROWS * COLUMNS * 9.0 + ROWS * 16.0) ** 0.5
    for max_norm in (0.0, norm / 2, norm * 2):
        bench = Bench(factory)
        bench.reduce(3.0, 4.0)
        bench.optimizer.unscale_(bench.one)
        expect(f"the norm returned by clip_({max_norm:g})", bench.optimizer.clip_(max_norm), norm)
        after = min(norm, max_norm or norm)
        expect(f"the norm after clip_({max_norm:g})", bench.optimizer.clip_(0.0), after)


def check_zeros(factory: OptimizerFactory) -> None:
    """``count_zeros`` counts the zeros of all gradients and none of the padding."""
    bench = Bench(factory)
    weight = torch.ones(ROWS, COLUMNS)
    weight[2, :5] = 0.0
    bench.reduce(weight, 0.0)
    bench.optimizer.unscale_(bench.one)
    bench.optimizer.clip_(1.0)
    expect("the zeros among gradients", bench.optimizer.count_zeros(), 5.0 + ROWS)


def check_descent(factory: OptimizerFactory) -> None:
    """A step moves against the gradient."""
    bench = Bench(factory)
    before = bench.weight.detach().clone()
    bench.step((torch.ones(ROWS, COLUMNS), torch.zeros(ROWS)), decay=0.0)
    moved = bench.weight.detach() - before
    if not (moved < 0).all():
        raise CheckFailed(f"a positive gradient moved the weight by up to {moved.max().item():g}, expected below 0")


def check_decay(factory: OptimizerFactory) -> None:
    """Weight decay moves matrices towards zero, beyond it where a rule normalises, and leaves biases."""
    bench = Bench(factory)
    before = bench.values()
    bench.step((torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS)), lr=0.1, decay=0.5)
    expect("a bias without gradient after weight decay", bench.bias, before["bias"])
    towards_zero = (before["weight"] - bench.weight.detach()) * before["weight"].sign()
    if not (towards_zero > 0)[before["weight"] != 0].all():
        raise CheckFailed("weight decay 0.5 left a matrix as it was")


def check_rates(factory: OptimizerFactory) -> None:
    """Each step takes the ``lr`` and ``weight_decay`` that it is given, whatever those of the step before were."""
    plain, fast, decayed = Bench(factory), Bench(factory), Bench(factory)
    for bench in (plain, fast, decayed):
        bench.step(gradients(0), lr=0.01, decay=0.0)
    before = plain.weight.detach().clone()
    for bench, lr, decay in ((plain, 0.01, 0.0), (fast, 0.02, 0.0), (decayed, 0.01, 0.5)):
        bench.step(gradients(1), lr=lr, decay=decay)
    usual, far = ((bench.weight.detach() - before).abs().sum().item() for bench in (plain, fast))
    if not far > usual:
        raise CheckFailed(f"a second step with twice the lr moved the weight by {far:g}, expected above {usual:g}")
    if not decayed.weight.detach().norm() < plain.weight.detach().norm():
        raise CheckFailed("weight decay 0.5 in a second step, after one without, left the weight as large as without")
    expect("a bias after weight decay in a second step", decayed.bias, plain.bias)


def check_small_updates(factory: OptimizerFactory) -> None:
    """Updates too small for 16 bits accumulate in the master weights: parameters equal those of fp32, rounded."""
    fp32, bf16 = Bench(factory), Bench(factory, single_process_context(dtype=torch.bfloat16))
    for step in range(40):
        for bench in (fp32, bf16):
            bench.step(gradients(step % 2), lr=2e-4, decay=0.0)
    for name, value in bf16.values().items():
        expected = fp32.values()[name]
        error = ((value.float() - expected).abs() / expected.abs().clamp(min=1e-2)).max().item()
        if error > 2**-8:  # one unit in the last of bf16's 8 bits
            raise CheckFailed(f"after 40 small steps {name} in bf16 is off by {error:.1%}, expected below 0.4%")


def check_memory(factory: OptimizerFactory) -> None:
    """``memory`` reports bytes by role, the same on the meta device as on a real one."""
    bench = Bench(factory)
    bench.step(gradients(0))
    planned_bench = Bench(factory, single_process_context(dtype=torch.float32, device="meta"))
    real, planned = bench.optimizer.memory(), planned_bench.optimizer.memory()
    if not set(real) <= _ROLES:
        raise CheckFailed(f"memory reports {', '.join(set(real) - _ROLES)}; the roles are {', '.join(sorted(_ROLES))}")
    if real.get("parameters", 0) < bench.weight.nbytes + bench.bias.nbytes:
        raise CheckFailed(f"memory reports {real.get('parameters', 0)} bytes of parameters, which are more")
    if planned.keys() & {"state", "host_state"} and dict(real) != dict(planned):
        raise CheckFailed(f"memory reports {dict(planned)} on the meta device, and {dict(real)} after a step")


def check_round_trip(factory: OptimizerFactory) -> None:
    """Saving changes nothing, and an optimizer that loads the state continues bit for bit; from step 0 too."""
    # In bf16 the masters are not the parameters: they must be saved unrounded, and the parameters follow them.
    for dtype, steps in product(_NAMES, (0, 3)):
        undisturbed, one, other = (Bench(factory, single_process_context(dtype=dtype)) for _ in range(3))
        for step in range(steps):
            undisturbed.step(gradients(step))
            one.step(gradients(step))
        for step in range(5, 7):
            other.step(gradients(step))
        saved = SavedState(one.optimizer.iter_state(), shapes(one))
        saved.load_into(other.optimizer)
        for step in range(steps, steps + 3):
            since = f"{_NAMES[dtype]}: {step - steps} steps after state of step {steps} was"
            expect_same(f"{since} given", one.values(), undisturbed.values())
            expect_same(f"{since} loaded", other.values(), undisturbed.values())
            for bench in (undisturbed, one, other):
                bench.step(gradients(step))


def check_weights_alone(factory: OptimizerFactory) -> None:
    """``load_weights`` takes the saved master weights, and continues as before the first step."""
    for dtype, name in _NAMES.items():
        fresh, trained = (Bench(factory, single_process_context(dtype=dtype)) for _ in range(2))
        for step in range(3):
            trained.step(gradients(step))
        masters = [piece for piece in fresh.optimizer.iter_state() if piece.field == MASTER]
        trained.optimizer.load_weights(SavedState(masters, shapes(fresh)))
        for step in range(3):
            expect_same(f"{name}: {step} steps after the weights alone were loaded", trained.values(), fresh.values())
            for bench in (fresh, trained):
                bench.step(gradients(step))


def check_nothing(factory: OptimizerFactory) -> None:
    """A stage without parameters works like any other."""
    optimizer = factory(single_process_context(dtype=torch.float32))
    optimizer.attach([], [], 1.0)
    optimizer.zero_grad()
    optimizer.finish_grad_sync()
    expect("found_inf of no gradients", optimizer.unscale_(torch.ones(1, device=current_device())), 0.0)
    expect("the norm of no gradients", optimizer.clip_(1.0), 0.0)
    expect("the zeros of no gradients", optimizer.count_zeros(), 0.0)
    optimizer.step(0.1, 0.1)
    optimizer.start_param_sync()
    if sum(optimizer.memory().values()) or list(optimizer.iter_state()):
        raise CheckFailed("an optimizer of no parameters holds memory or state")


def shapes(bench: Bench) -> dict[str, tuple[int, ...]]:
    """Shapes of the logical tensors, by name."""
    return {part.name: part.shape for info in bench.infos.values() for part in info.parts}


def expect(what: str, found: Tensor, expected: Tensor | float) -> None:
    """Raise unless ``found`` equals ``expected`` up to rounding."""
    values = found.detach().cpu()
    wanted = torch.as_tensor(expected, dtype=values.dtype, device=values.device).expand_as(values)
    if not torch.allclose(values, wanted, rtol=1e-5, atol=1e-7):
        raise CheckFailed(f"{what} is {values.flatten()[0].item():g}, expected {wanted.flatten()[0].item():g}")


def expect_same(what: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise unless every tensor of ``found`` equals that of ``expected`` bit for bit."""
    for name, value in expected.items():
        if not torch.equal(found[name], value):
            most = (found[name] - value).abs().max().item()
            raise CheckFailed(f"{what}: {name} is off by up to {most:g}, expected equal bits")
