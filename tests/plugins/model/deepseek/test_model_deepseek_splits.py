"""Latent attention, with experts, predictors or neither, learns the same however it is split."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_run.config.request import Request
from tests.support.training import Seen, train_many

pytestmark = pytest.mark.multiproc

SETS = (
    "model.hidden_size=24",
    "model.num_heads=4",
    "model.kv_rank=12",
    "model.query_rank=8",
    "model.rope_head_size=4",
    "model.nope_head_size=6",
    "model.value_head_size=8",
    "model.init_std=0.1",
    "train.steps=2",  # the first moves the routers' biases, and the evaluation comes after the second
    "train.sequence_length=16",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "eval.interval=2",
    "eval.batches=1",
)
EXPERTS = (
    "model.experts.count=4",
    "model.experts.ffn_size=16",
    "model.experts.layer_first=1",
    "model.experts.router.score_function=sigmoid",
    "model.experts.router.groups=2",
    "model.experts.router.bias_rate=0.05",
    "model.experts.shared.ffn_size=16",
)
PREDICTING = ("model.mtp_layers=2", "model.loss_chunks=2")
BOTH = (*EXPERTS, *PREDICTING)
#: Splits of two ranks: (settings, plugins); those of experts and of predictors have them.
SPLITS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tensor": (("parallel.tensor=2",), ("parallel-layer=tensor",)),
    "sequence": (("parallel.tensor=2", "parallel.sequence=true"), ("parallel-layer=tensor", "optimizer=zero1")),
    "pipeline": (("parallel.pipeline=2", "train.recompute=core_attn"), ("schedule=zero-bubble",)),
    "experts": (("parallel.expert=2", *EXPERTS), ()),
    "experts, sequence": (("parallel.tensor=2", "parallel.sequence=true", *EXPERTS), ("parallel-layer=tensor",)),
    "experts, pipeline": (("parallel.pipeline=2", "train.recompute=full", *EXPERTS), ("schedule=1f1b",)),
    "predictors, sequence": (("parallel.tensor=2", "parallel.sequence=true", *PREDICTING), ("parallel-layer=tensor",)),
    "predictors, pipeline": (("parallel.pipeline=2", *PREDICTING), ("schedule=zero-bubble", "optimizer=zero1")),
    "predictors, chunks": (
        ("parallel.pipeline=2", "parallel.chunks=2", "train.recompute=full", *PREDICTING),
        ("schedule=interleaved",),
    ),
    "predictors, data": (("parallel.data=2", *PREDICTING), ("optimizer=zero1",)),
    "both, context": (("parallel.context=2", *BOTH), ("parallel-layer=dense+context",)),
    "both, experts": (("parallel.expert=2", *BOTH), ()),
    "both, sequence": (("parallel.tensor=2", "parallel.sequence=true", *BOTH), ("parallel-layer=tensor",)),
    "both, pipeline": (("parallel.pipeline=2", *BOTH), ("schedule=zero-bubble", "optimizer=zero1")),
    "both, chunks": (
        ("parallel.pipeline=2", "parallel.chunks=2", "train.recompute=full", *BOTH),
        ("schedule=interleaved",),
    ),
}


def request(sets: tuple[str, ...] = (), plugins: tuple[str, ...] = ()) -> Request:
    return Request(configs=("preset:tiny",), sets=(*SETS, *sets), plugins=("model=deepseek", *plugins))


KINDS = {"": (), "experts": EXPERTS, "predictors": PREDICTING, "both": BOTH}
#: Each kind of split once, with each kind of layer.
FEW = ["both, sequence", "both, chunks", "both, experts", "both, pipeline", "both, context"]


def kind_of(name: str) -> str:
    """Which layers the model of a split has."""
    kind = name.partition(",")[0]
    return kind if kind in KINDS else ""


@pytest.mark.parametrize(
    "names",
    [FEW, pytest.param([name for name in SPLITS if name not in FEW], marks=pytest.mark.nightly)],
    ids=["few", "others"],
)
def test_every_split_has_the_losses_of_one_process(names: list[str]) -> None:
    asked = {"": (), **{kind: KINDS[kind] for kind in map(kind_of, names)}}
    alone = dict(zip(asked, train_many(1, [request(sets) for sets in asked.values()]), strict=True))
    norms = [ranks[0].norms[0] for ranks in alone.values()]
    assert len({round(norm, 3) for norm in norms}) == len(asked) > 1, "different models"
    found = train_many(2, [request(*SPLITS[name]) for name in names])
    for name, ranks in zip(names, found, strict=True):
        single: Seen = alone[kind_of(name)][0]
        np.testing.assert_allclose(ranks[0].losses, single.losses, rtol=0, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(ranks[0].norms, single.norms, rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(ranks[0].validation, single.validation, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.nightly  # test_integration_tensor_random and the grid have those of gpt
def test_masks_of_dropout_follow_samples_and_layers_alone() -> None:
    """Tensor-parallel ranks draw others, but each the same for what both hold: the guard ends a run that does not."""
    dropping = (*PREDICTING, *EXPERTS, "model.dropout=0.3")
    (expected,), (plain,) = train_many(1, [request(dropping), request((*PREDICTING, *EXPERTS))])
    assert abs(expected.losses[0] - plain.losses[0]) > 1e-3
    splits = {
        ("parallel.pipeline=2",): ("schedule=1f1b",),
        ("parallel.data=2", "train.recompute=full"): (),
        ("parallel.tensor=2", "guard.replica_interval=1"): ("parallel-layer=tensor",),
        ("parallel.tensor=2", "parallel.sequence=true", "guard.replica_interval=1"): ("parallel-layer=tensor",),
    }
    asked = [request((*dropping, *sets), plugins) for sets, plugins in splits.items()]
    pipeline, data, *split = (ranks[0] for ranks in train_many(2, asked))
    for found in (pipeline, data):
        np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=1e-5)
        np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-4)
    assert all(len(each.losses) == 2 for each in split)
