"""Muon of matrices that ranks hold in parts is torch's Muon of the whole ones."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_run.contracts import Part
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.errors import InputError
from megatron_run_engine.optim import newton_schulz
from megatron_run_engine.optim.split_muon import SplitMuon
from megatron_run_engine.runtime.comm import ParallelGroup, create_groups
from tests.support.ranks import run_ranks

STEPS, LR, DECAY = 4, 0.05, 0.1
#: By name: shape, and the dimension that ranks cut, if any. Two rows, two columns, so that owners are not all one rank.
MATRICES: dict[str, tuple[tuple[int, int], int | None]] = {
    "query": ((24, 16), 0),
    "projection": ((16, 24), 1),
    "up": ((32, 16), 0),
    "down": ((16, 32), 1),
    "router": ((4, 16), None),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "as large as AdamW's": {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "momentum": 0.9},
    "another iteration": {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-6},
}


def values(name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * [*MATRICES].index(name) + step)
    return torch.randn(MATRICES[name][0], generator=generator)


def learned(muon: Any, own: Any, parameters: dict[str, Parameter]) -> dict[str, Any]:
    for step in range(1, STEPS + 1):
        for group in muon.param_groups:
            group["lr"] = 0.0 if step == 1 else LR  # as a warm-up begins
        for name, parameter in parameters.items():
            parameter.grad = own(values(name, step), name).clone()
        muon.step()
    momenta = {f"{name} momentum": muon.state[p]["momentum_buffer"] for name, p in parameters.items()}
    return {name: each.detach().numpy() for name, each in {**parameters, **momenta}.items()}


def on_rank(rank: int, world: int, variant: str) -> dict[str, Any]:
    topology = Topology(Sizes(tensor=world), rank)
    peers = create_groups(topology, timedelta(seconds=30)).parallel_group(topology, "tensor")

    def own(whole: Tensor, name: str) -> Tensor:
        dim = MATRICES[name][1]
        return whole if dim is None else whole.chunk(world, dim)[rank]

    parameters = {name: Parameter(own(values(name, 0), name).clone()) for name in MATRICES}
    muon = SplitMuon([*parameters.values()], weight_decay=DECAY, **VARIANTS[variant])
    parts = {p: Part(name, MATRICES[name][0], range(len(p))) for name, p in parameters.items()}
    muon.split(parts, peers)
    owners = [each.owner for each in muon._splits.values()]
    assert sorted(set(owners)) == [*range(world)], "some rank has no work"
    return learned(muon, own, parameters)


@pytest.mark.multiproc
@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_move_as_the_whole_does(variant: str) -> None:
    whole = {name: Parameter(values(name, 0)) for name in MATRICES}
    muon = torch.optim.Muon([*whole.values()], weight_decay=DECAY, **VARIANTS[variant])
    expected = learned(muon, lambda each, name: each, whole)
    ranks = run_ranks(on_rank, 2, variant)
    for name, (_, dim) in MATRICES.items():
        for label in (name, f"{name} momentum"):
            found = ranks[0][label] if dim is None else np.concatenate([each[label] for each in ranks], dim)
            np.testing.assert_allclose(found, expected[label], rtol=0, atol=1e-6)
        assert np.abs(expected[name] - values(name, 0).numpy()).max() > LR / 10


#: Matrices of one shape, some of them standing, as experts have, and one of its own.
ALIKE = {**{f"expert {n}": (12, 20) if n % 3 else (20, 12) for n in range(7)}, "alone": (16, 16)}


@pytest.mark.parametrize("together", [2**24, 500])
def test_matrices_of_one_shape_move_together_as_each_alone(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(newton_schulz, "MOST_ON_CPU", together)
    batched, single = (
        {name: Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(n))) for n, (name, shape) in each}
        for each in (enumerate(ALIKE.items()), enumerate(ALIKE.items()))
    )
    products: list[int] = []
    iterated = newton_schulz._iterated

    def watched(x: Tensor, *how: Any) -> Tensor:
        products.append(len(x) if x.ndim > 2 else 1)
        return iterated(x, *how)

    monkeypatch.setattr(newton_schulz, "_iterated", watched)
    found = [kind([*each.values()], lr=0.1) for kind, each in ((SplitMuon, batched), (torch.optim.Muon, single))]
    for step in range(2):
        for n, (name, shape) in enumerate(ALIKE.items()):
            gradient = torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + n))
            batched[name].grad, single[name].grad = gradient.clone(), gradient.clone()
        for muon in found:
            muon.step()
    assert products == ([3, 4, 1] if together > 500 else [2, 1, 2, 2, 1]) * 2
    for name in ALIKE:
        np.testing.assert_allclose(batched[name].detach(), single[name].detach(), rtol=0, atol=1e-6)
        assert batched[name].grad is not None


def test_unequal_parts_are_refused_by_name() -> None:
    parameter = Parameter(torch.zeros(5, 4))
    muon = SplitMuon([parameter])
    with pytest.raises(InputError, match=r"unequal parts of output\.weight") as caught:
        muon.split({parameter: Part("output.weight", (9, 4), range(5))}, ParallelGroup(0, 2))
    assert "--set optimizer.adamw_for=output.weight" in str(caught.value)


@pytest.mark.parametrize("steps", ["abc", 0, 200, 2.5])
def test_iterations_that_torch_would_refuse_in_a_step_are_refused_at_once(steps: object) -> None:
    with pytest.raises(ValueError, match=r"ns_steps is .*, and should be an integer from 1 to 99"):
        SplitMuon([Parameter(torch.zeros(2, 2))], ns_steps=steps)
