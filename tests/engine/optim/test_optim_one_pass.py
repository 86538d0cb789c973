"""The update in one pass against PyTorch's own: by Triton's interpreter, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron_run.contracts import ChunkOut, Init, ParameterSpec
from megatron_run_engine.builtin.optimizer.adamw import megatron_run_create_optimizer
from megatron_run_engine.optim import UpdateOptions, flat, one_pass, update
from megatron_run_engine.optim.gradients import FactorsAtOnce, LateFactors
from megatron_run_engine.optim.one_pass import OnePass
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_engine.runtime.parameter_init import describe_parameters
from megatron_run_testing.build_contexts import single_process_context
from megatron_run_testing.optimizer.bench import SavedState
from tests.support.interpreted import interpreted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RULES = ("adamw", "adam")
#: Shapes of matrices and vectors, of which only the first decay: less than a block, and a few blocks and a part.
SIZES = {"small": (3, 5), "matrix": (70, 96), "bias": (11,), "long": (5000,)}
Values = dict[tuple[str, str], Tensor]


class Chunk(nn.Module):
    """Parameters of ``SIZES``."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SIZES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)))
        self.parameter_specs: Mapping[str, ParameterSpec] = {
            name: ParameterSpec(Init("zeros") if len(shape) == 1 else Init("normal", 0.5))
            for name, shape in SIZES.items()
        }

    def forward(self, x: object, microbatch: object) -> ChunkOut:
        raise AssertionError("an optimizer runs no chunk")

    def segments(self) -> tuple[()]:
        return ()


class Trial:
    """An optimizer of :class:`Chunk`; ``torchs`` is that without kernels."""

    def __init__(self, rule: str, dtype: str, device: str, *, torchs: bool) -> None:
        self.chunk = Chunk(DTYPES[dtype], device)
        context = single_process_context(dtype=DTYPES[dtype], device=device)
        options = UpdateOptions(rule=rule, betas=(0.9, 0.99), eps=1e-6, lr_mult=("*long:0.5",), bucket_size=6000)
        optimizer = megatron_run_create_optimizer(context, options)
        self.optimizer = cast("Any", optimizer)
        factors = mock.patch.object(flat, "gradients_of", FactorsAtOnce if torchs else LateFactors)
        with factors, mock.patch.object(update, "one_pass_of", return_value=None) if torchs else nullcontext():
            self.optimizer.attach([self.chunk], [describe_parameters(self.chunk, 0)], 1.0)
        assert torchs or isinstance(self.optimizer._updates[0]._one_pass, OnePass)

    def step(self, number: int, max_norm: float) -> None:
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number)
        for parameter in self.chunk.parameters():
            main_grad(parameter).copy_(torch.randn(parameter.shape, generator=generator) * 8)
        self.optimizer.finish_grad_sync()
        one = torch.ones(1, device=main_grad(parameter).device)
        assert not self.optimizer.unscale_(one / 8).item()
        self.optimizer.clip_(max_norm)
        self.optimizer.step(0.1 / number, 0.1)

    def values(self) -> Values:
        pieces = {
            (piece.name, piece.field): piece.tensor.detach().cpu().clone() for piece in self.optimizer.iter_state()
        }
        return pieces | {(name, "parameter"): p.detach().cpu().clone() for name, p in self.chunk.named_parameters()}


def trained(rule: str, dtype: str, device: str, *, torchs: bool) -> Values:
    """After three steps, of which the second is clipped, and a step more from what was saved, and from its weights."""
    trial = Trial(rule, dtype, device, torchs=torchs)
    for number, max_norm in ((1, 0.0), (2, 3.0), (3, 1e9)):
        trial.step(number, max_norm)
    again = Trial(rule, dtype, device, torchs=torchs)
    again.step(7, 0.0)  # its tables are made
    shapes = {f".{name}": shape for name, shape in SIZES.items()}
    saved = SavedState(trial.optimizer.iter_state(), shapes)
    again.optimizer.load_state(saved.read)
    again.step(4, 2.0)
    resumed = {(name, f"{field} of all"): value for (name, field), value in again.values().items()}
    again.optimizer.load_weights(saved.read)
    again.step(5, 2.0)
    return resumed | again.values()


CASES = list(product(RULES, DTYPES))
BY_DAY = [("adamw", "bf16"), ("adam", "fp32")]


def both(device: str, cases: Sequence[tuple[str, str]]) -> list[tuple[Values, Values]]:
    return [
        (trained(rule, dtype, device, torchs=False), trained(rule, dtype, device, torchs=True)) for rule, dtype in cases
    ]


def compare(found: Iterable[tuple[Values, Values]]) -> None:
    for ours, torchs in found:
        assert ours.keys() == torchs.keys()
        for key, value in ours.items():
            expected = torchs[key]
            assert value.dtype == expected.dtype
            # A parameter of 16 bits may be rounded to its neighbour.
            rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(value.dtype, 4e-6)
            torch.testing.assert_close(value, expected, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("cases", [BY_DAY, pytest.param(CASES, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_it_gives_what_torchs_rules_give(cases: list[tuple[str, str]]) -> None:
    compare(interpreted(both, "cpu", cases))


@pytest.mark.gpu
def test_it_gives_what_torchs_rules_give_on_a_gpu() -> None:
    compare(both("cuda", CASES))


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "sgd"},
        {"rule": "muon"},
        {"rule_options": {"amsgrad": True}},
        {"rule_options": {"maximize": True}},
        {"rule_options": {"fused": False}},
    ],
    ids=str,
)
def test_other_rules_are_torchs(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "has_kernels", lambda _: True)
    for given, expected in ((options, type(None)), ({}, OnePass)):
        optimizer: Any = megatron_run_create_optimizer(
            single_process_context(dtype=torch.bfloat16), UpdateOptions(**given)
        )
        chunk = Chunk(torch.bfloat16, "cpu")
        optimizer.attach([chunk], [describe_parameters(chunk, 0)], 1.0)
        assert isinstance(optimizer._updates[0]._one_pass, expected)


def test_without_kernels_the_rule_is_torchs() -> None:
    chunk = Chunk(torch.bfloat16, "cpu")
    optimizer: Any = megatron_run_create_optimizer(single_process_context(dtype=torch.bfloat16), UpdateOptions())
    optimizer.attach([chunk], [describe_parameters(chunk, 0)], 1.0)
    assert optimizer._updates[0]._one_pass is None
