"""What a rank of a split model holds, without starting one: each value once, or a refusal that says what to type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megatron_run.contracts import ParamInfo
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.errors import InputError
from megatron_run_engine.builtin.model.gpt import GptOptions
from megatron_run_engine.runtime.comm import Groups
from tests.support.tensor_layers import gpt_context, split_gpt

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "position": "rope",
        "norm.kind": "rmsnorm",
        "activation": "swiglu",
        "ffn_size": 40,
        "bias": False,
        "tie_embeddings": False,
    },
}


def built(rank: int, world: int, options: dict[str, Any], **how: Any) -> tuple[ParamInfo, ...]:
    """The parameters of one rank; they are planned, not made."""
    with torch.device("meta"):
        context = gpt_context(Topology(Sizes(tensor=world), rank), Groups(), options, **how)
        return tuple(split_gpt(context).infos.values())


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_every_value_is_counted_on_exactly_one_rank(options: dict[str, Any], world: int, sequence: bool) -> None:
    """Biases and norms, positions and the tied matrix included: the gradient norm sees each once."""
    times: dict[str, torch.Tensor] = {}
    for rank in range(world):
        for info in built(rank, world, options, sequence=sequence):
            for part in info.parts:
                count = times.setdefault(part.name, torch.zeros(part.shape))
                # A row linear layer's weight is all rows and some columns, what else is split is split by rows.
                columns = slice(part.column, part.column + part.shape[-1] // world if _by_columns(info) else None)
                box = (slice(part.start, part.start + len(part.local)), columns)[: len(part.shape)]
                count[box] += info.counted
    whole = {part.name: part.shape for info in built(0, 1, options) for part in info.parts}
    assert {name: tuple(count.shape) for name, count in times.items()} == whole
    for name, count in times.items():
        assert (count == 1).all(), name


def _by_columns(info: ParamInfo) -> bool:
    return info.name.endswith("output.weight") and info.name.startswith("layers.")


@pytest.mark.parametrize("sequence", [False, True])
def test_only_what_sees_a_part_of_the_tokens_has_a_part_of_its_gradient(sequence: bool) -> None:
    partial = {info.name for info in built(1, 2, {"num_layers": 1}, sequence=sequence) if info.partial_over}
    norms = [f"{name}.norm.{end}" for name in ("layers.0.attention.qkv", "layers.0.mlp.input") for end in ENDS]
    expected = {
        *norms,
        *(f"final_norm.{end}" for end in ENDS),
        "layers.0.attention.output.bias",
        "layers.0.mlp.output.bias",
        "embedding.position.weight",
    }
    assert partial == (expected if sequence else set())


ENDS = ("weight", "bias")


@dataclass(frozen=True)
class Refused:
    """A model (``options``) and a run (``how``) that do not split over ``ranks``; ``fixes`` are what to type instead.

    A fix is other options, other ways to run, or another number of ranks.
    """

    options: dict[str, Any]
    ranks: int
    message: str
    fixes: tuple[dict[str, Any], ...]
    how: dict[str, Any] = field(default_factory=dict)


REFUSED = {
    "heads": Refused(
        {"num_heads": 6, "num_kv_heads": None, "hidden_size": 48},
        4,
        "6 attention heads (model.num_heads) do not split over 4 tensor-parallel ranks: 6 / 4 = 1.5; "
        "set parallel.tensor to 3 or 6, or choose 4 or 8 attention heads (model.num_heads)",
        ({"ranks": 3}, {"ranks": 6}, {"num_heads": 4}, {"num_heads": 8}),
    ),
    "heads whose features do not split either": Refused(
        {"num_heads": 3, "num_kv_heads": None, "hidden_size": 36, "ffn_size": 12},
        8,
        "3 attention heads (model.num_heads) do not split over 8 tensor-parallel ranks: 3 / 8 = 0.375; "
        "set parallel.tensor to 3, or choose 8 attention heads (model.num_heads)",
        ({"ranks": 3},),
    ),
    "key-value heads": Refused(
        {"num_kv_heads": 2},
        4,
        "2 key-value heads (model.num_kv_heads) do not split over 4 tensor-parallel ranks: 2 / 4 = 0.5; "
        "set parallel.tensor to 2, or choose 4 key-value heads (model.num_kv_heads)",
        ({"ranks": 2}, {"num_kv_heads": 4}),
    ),
    "feed-forward features": Refused(
        {"ffn_size": 50},
        4,
        "50 features of up (model.ffn_size) do not split over 4 tensor-parallel ranks: 50 / 4 = 12.5; "
        "set parallel.tensor to 2 or 5, or choose 48 or 52 features of up (model.ffn_size)",
        ({"ranks": 2}, {"ffn_size": 48}, {"ffn_size": 52}),
    ),
    "tokens": Refused(
        {"num_heads": 12, "num_kv_heads": None, "hidden_size": 48},
        4,
        "18 tokens of train.sequence_length do not split over 4 tensor-parallel ranks: 18 / 4 = 4.5; "
        "set parallel.tensor to 3 or 6, or choose 16 or 20 tokens of train.sequence_length",
        ({"ranks": 3}, {"ranks": 6}, {"sequence_length": 16}, {"sequence_length": 20}),
        {"sequence_length": 18, "sequence": True},
    ),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_a_shape_that_does_not_split_is_refused_with_the_arithmetic_and_a_fix_that_works(refused: Refused) -> None:
    with pytest.raises(InputError) as caught:
        built(0, refused.ranks, refused.options, **refused.how)
    assert str(caught.value) == refused.message
    for fix in refused.fixes:
        how = {**refused.how, **{key: value for key, value in fix.items() if key == "sequence_length"}}
        options = {**refused.options, **{key: value for key, value in fix.items() if key in GptOptions.model_fields}}
        built(0, fix.get("ranks", refused.ranks), options, **how)
