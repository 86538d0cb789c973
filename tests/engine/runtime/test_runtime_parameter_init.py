from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_run.contracts import Init, ParameterSpec, Part
from megatron_run_engine.runtime.parameter_init import count_parameters, describe_parameters, initialise


class Fused(nn.Module):
    """Three rows of q, two of k, one of padding. ``offset`` cuts q as a second shard would."""

    def __init__(self, offset: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6, 4), 7.0))
        parts = (Part("q.weight", (6, 4), range(3), start=offset), Part("k.weight", (2, 4), range(3, 5)))
        self.parameter_specs = {"weight": ParameterSpec(Init("normal", 0.5), parts)}


class Model(nn.Module):
    def __init__(self, offset: int = 0) -> None:
        super().__init__()
        self.attention, self.norm = Fused(offset), nn.LayerNorm(4)


def test_names_parts_and_decay_follow_from_the_tree() -> None:
    model = Model()
    infos = describe_parameters(model)  # type: ignore[arg-type]  # parameters are all that is looked at
    by_name = {info.name: info for info in infos.values()}
    assert set(by_name) == {"attention.weight", "norm.weight", "norm.bias"}
    assert [part.name for part in by_name["attention.weight"].parts] == ["attention.q.weight", "attention.k.weight"]
    assert by_name["norm.weight"].init.kind == "ones"
    assert {name: info.decay for name, info in by_name.items()} == {
        "attention.weight": True,
        "norm.weight": False,
        "norm.bias": False,
    }
    assert count_parameters(infos.values()) == 6 * 4 + 2 * 4 + 4 + 4


def test_shards_are_cut_out_of_the_same_initial_values_and_padding_is_zero() -> None:
    weights = []
    for offset in (0, 3):
        model = Model(offset)
        initialise(describe_parameters(model), seed=3)  # type: ignore[arg-type]  # as above
        weights.append(model.attention.weight.detach())
    first, second = weights
    assert torch.equal(first[3:5], second[3:5])
    assert not torch.equal(first[:3], second[:3])
    assert torch.equal(first[5], torch.zeros(4))
    whole = torch.cat([first[:3], second[:3]])
    assert 0.2 < whole.std().item() < 0.8


def test_a_matrix_without_a_spec_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"inner.weight has no parameter_specs entry"):
        describe_parameters(nn.ModuleDict({"inner": nn.Linear(2, 2)}))  # type: ignore[arg-type]  # as above


def test_what_every_rank_holds_whole_is_counted_on_the_first_and_a_shard_everywhere() -> None:
    for rank in range(3):
        infos = describe_parameters(Model(), tensor_rank=rank)  # type: ignore[arg-type]  # as above
        counted = {info.name: info.counted for info in infos.values()}
        assert counted == {"attention.weight": True, "norm.weight": rank == 0, "norm.bias": rank == 0}


def test_columns_of_a_matrix_are_a_shard_too() -> None:
    values = []
    for column, width in ((0, 8), (0, 4), (4, 4)):
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.empty(6, width))
        part = Part("weight", (6, 8), range(6), column=column)
        layer.parameter_specs = {"weight": ParameterSpec(Init("normal", 0.5), (part,))}  # type: ignore[assignment]  # no module
        infos = describe_parameters(nn.ModuleDict({"layer": layer}), tensor_rank=1)  # type: ignore[arg-type]  # as above
        initialise(infos, seed=3)
        (info,) = infos.values()
        assert info.counted is (width == 4)
        assert info.parts[0].name == "layer.weight"
        values.append(layer.weight.detach())
    assert count_parameters([info]) == 6 * 8
    whole, left, right = values
    assert torch.equal(torch.cat((left, right), dim=1), whole)
