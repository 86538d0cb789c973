"""Imported mixtures learn the same, however they are split; those that no family can be are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_run.config.request import Request
from megatron_run.errors import RunError
from megatron_run_engine.formats import convert
from tests.plugins.format.huggingface.family_cases import EXPERTS_SPLIT
from tests.plugins.format.huggingface.test_format_huggingface_families import theirs
from tests.support.small_models import LLAMA, saved_network
from tests.support.training import train_many

#: Splits of two ranks: (settings, plugins).
SPLITS = {
    "ep 2": (("parallel.expert=2",), ()),
    "tp 2": (("parallel.tensor=2", "parallel.sequence=true"), ("parallel-layer=tensor",)),
    "pp 2": (("parallel.pipeline=2",), ("schedule=1f1b",)),
}
SETS = ("data.vocab_size=61", "train.steps=3", "train.global_batch_size=4", "eval.interval=3", "eval.batches=1")


def request(folder: Path, sets: tuple[str, ...] = (), plugins: tuple[str, ...] = ()) -> Request:
    """What ``megatron-run FOLDER/config.yaml`` trains, few steps of it."""
    sets = (*SETS, "train.micro_batch_size=1", *sets)
    return Request(configs=("preset:tiny", str(folder / "config.yaml")), sets=sets, plugins=plugins)


@pytest.mark.nightly  # what is imported alike is split alike: test_integration_experts
@pytest.mark.multiproc
def test_every_split_of_an_imported_mixture_has_the_losses_of_one_process(tmp_path: Path) -> None:
    folders = []
    for case in EXPERTS_SPLIT:
        theirs(case, tmp_path / case, changes={"num_hidden_layers": 4})
        folders.append(tmp_path / f"{case} here")
        convert.import_model(tmp_path / case, folders[-1])
    alone = train_many(1, [request(folder) for folder in folders])
    split = train_many(2, [request(folder, *split) for folder in folders for split in SPLITS.values()])
    names = [(number, name) for number in range(len(folders)) for name in SPLITS]
    assert alone[0][0].losses[0] != pytest.approx(alone[1][0].losses[0], abs=1e-3), "two different models"
    for (number, name), ranks in zip(names, split, strict=True):
        single = alone[number][0]
        np.testing.assert_allclose(ranks[0].losses, single.losses, rtol=0, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(ranks[0].norms, single.norms, rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(ranks[0].validation, single.validation, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 (only 0.0)"),
        ("qwen3 with experts", {"attention_bias": True}, "attention_bias=True (only False)"),
        ("qwen3 with experts", {"use_sliding_window": True}, "use_sliding_window=True (only False)"),
        ("qwen3 with experts", {"num_experts_per_tok": 5}, "a token cannot be routed to 5 of 4 experts"),
    ],
)
def test_a_mixture_that_is_close_is_refused_with_what_differs(
    case: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    theirs(case, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(RunError) as error:
        convert.import_model(tmp_path / "hf", tmp_path / "ours")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"experts.router.bias_rate": 1e-3}, "mixtral: model.experts.router.bias_rate=0.001 (the family has 0.0)"),
        (
            {"experts.router.score_function": "sigmoid"},
            "model.experts.router.score_function=sigmoid (the family has softmax)",
        ),
        ({"experts.layer_first": 1}, "model.experts.layer_pattern=(0, 1) (the family has"),
        ({"experts.shared.ffn_size": 8}, "mixtral: model.experts.shared.ffn_size=8 (the family has unset)"),
    ],
)
def test_a_mixture_between_the_families_is_not_exported(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    experts = {"experts.count": 4, "experts.ffn_size": 20, "experts.aux_loss_coeff": 0.0}
    saved_network(tmp_path / "fits", {**LLAMA, **experts})
    convert.export_model(tmp_path / "fits", tmp_path / "hf", "huggingface")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "mixtral"
    saved_network(tmp_path / "run", {**LLAMA, **experts, **changes})
    with pytest.raises(RunError) as error:
        convert.export_model(tmp_path / "run", tmp_path / "no", "huggingface")
    assert reason in str(error.value)
