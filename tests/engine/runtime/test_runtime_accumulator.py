from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import Parameter

from megatron_run.contracts import Init, ParamInfo
from megatron_run.errors import PluginError
from megatron_run_engine.optim.buckets import build_buckets
from megatron_run_engine.runtime.gradients import GradientAccumulator, main_grad


def make(*names: str) -> tuple[GradientAccumulator, list[Parameter]]:
    gradients, parameters = GradientAccumulator(), [Parameter(torch.ones(2)) for _ in names]
    build_buckets([{p: ParamInfo(n, (), Init("zeros"), decay=True) for p, n in zip(parameters, names, strict=True)}], 1)
    for parameter, name in zip(parameters, names, strict=True):
        gradients.adopt(parameter, name)
    return gradients, parameters


def add_one(parameter: Parameter) -> None:
    main_grad(parameter).add_(1.0)


def test_what_autograd_accumulates_moves_into_main_grad() -> None:
    (parameter,) = make("w")[1]  # nobody else holds the accumulator
    for _ in range(3):
        (parameter * 2.0).sum().backward()
    assert parameter.grad is None
    assert torch.equal(main_grad(parameter), torch.full((2,), 6.0))


def test_a_training_that_is_over_leaves_no_model_and_no_gradients() -> None:
    gradients, parameters = make("w")
    (parameters[0] * 2.0).sum().backward()
    left = weakref.ref(gradients), weakref.ref(parameters.pop())
    del gradients
    gc.collect()
    assert [each() for each in left] == [None, None], "autograd holds the hook of a parameter"


def test_a_submitted_gradient_runs_at_once_in_a_whole_backward() -> None:
    gradients, (parameter,) = make("w")
    gradients.submit((parameter,), lambda: add_one(parameter))
    assert main_grad(parameter).sum() == 2.0


def test_a_split_backward_keeps_weight_gradients_for_w_in_order() -> None:
    gradients, (parameter,) = make("w")
    ran: list[int] = []
    with gradients.deferring((0, 1)):
        gradients.submit((parameter,), lambda: ran.append(1))
        gradients.submit((parameter,), lambda: ran.append(2))
    assert ran == []
    gradients.run_deferred((1, 1))
    assert ran == []
    gradients.run_deferred((0, 1))
    assert ran == [1, 2]
    gradients.submit((parameter,), lambda: ran.append(3))
    assert ran == [1, 2, 3], "a whole backward that follows puts nothing off"


def test_the_last_arrival_is_announced_from_the_second_step_on_for_any_number_of_microbatches() -> None:
    gradients, (once, twice) = make("once", "twice")
    ready: list[Parameter] = []
    for step, microbatches in enumerate((2, 3, 1)):
        gradients.start_step(microbatches, ready.append)
        for microbatch in range(microbatches):
            assert ready == []
            (twice.sum() * 1.0).backward()
            gradients.submit((once, twice), lambda: None)
            if step and microbatch + 1 == microbatches:
                assert ready == [once, twice]
        ready.clear()


def test_a_gradient_after_the_last_is_an_error_that_names_the_parameter() -> None:
    gradients, (parameter,) = make("layers.0.weight")
    for _ in range(2):
        gradients.start_step(1, lambda _: None)
        gradients.submit((parameter,), lambda: None)
    with pytest.raises(PluginError, match=r"layers\.0\.weight arrived after its bucket was sent"):
        gradients.submit((parameter,), lambda: None)


def test_a_parameter_that_the_model_has_frozen_is_refused() -> None:
    frozen = Parameter(torch.zeros(3), requires_grad=False)
    with pytest.raises(PluginError, match=r"froze its parameter embedding\.weight.*register_buffer"):
        GradientAccumulator().adopt(frozen, "embedding.weight")
