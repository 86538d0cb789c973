"""The parameters that a plan names are those that a run counts: biases, norms and small tables too."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_run import load_config
from megatron_run_cli.main import main
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_model_bert import Bert
from megatron_run_model_bert.options import BertOptions
from megatron_run_model_t5 import T5
from megatron_run_model_t5.options import T5Options
from megatron_run_planner.task import read_task
from megatron_run_testing.model import model_checks

SIZES = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 130}
GPT = {
    "default": "",
    "without biases": "bias=false",
    "biases of queries alone": "bias=false attention.qkv_bias=true",
    "rms norms, twice": "norm.kind=rmsnorm norm.placement=sandwich",
    "norms after": "norm.placement=post",
    "norms of heads": "attention.qk_norm=head",
    "norms of all heads": "attention.qk_norm=full norm.kind=rmsnorm num_kv_heads=2",
    "gated": "activation=swiglu tie_embeddings=false",
    "experts": "experts.count=4 experts.shared.ffn_size=32 experts.shared.gate=true",
    "experts with biases": "experts.count=4 experts.router.score_function=sigmoid experts.router.bias_rate=0.001",
}
BERT = {name: f"head={name}" for name in ("masked", "classification", "span")}
BERT |= {"choice": "head=choice choices=4", "norms after": "norm.order=post"}
LATENTS = {
    "deepseek": {"kv_rank": 16, "query_rank": 24, "rope_head_size": 8, "nope_head_size": 8, "value_head_size": 16}
}
DEEPSEEK = {
    "default": "",
    "no latent of queries": "query_rank=null",
    "predictors": "mtp_layers=2",
    "experts": "experts.count=4 experts.layer_freq=2 mtp_layers=1",
}
CASES = {
    f"{model}, {name}": (model, words)
    for model, cases in (("gpt", GPT), ("bert", BERT), ("deepseek", DEEPSEEK))
    for name, words in cases.items()
}


@pytest.mark.parametrize(("model", "words"), CASES.values(), ids=CASES)
def test_a_plan_counts_as_many_parameters_as_a_run(model: str, words: str) -> None:
    sizes = {**SIZES, **LATENTS.get(model, {})}
    train = {"steps": 1, "global_batch_size": 4, "sequence_length": 16}
    sections = {"model": {"use": model, **sizes}, "data": {"use": "mock"}, "train": train}
    run = load_config(sections, sets=[f"model.{word}" for word in words.split()])
    assert read_task(run.request, None).model.parameters == model_size(run).parameters


OF_OTHER_DATA = {
    "bert, pretraining": (Bert, BertOptions.model_validate({**SIZES, "head": "pretraining"})),
    "t5": (T5, T5Options.model_validate(SIZES)),
    "t5, untied": (T5, T5Options.model_validate({**SIZES, "tie_embeddings": False, "activation": "geglu_tanh"})),
}


@pytest.mark.parametrize(("model", "options"), OF_OTHER_DATA.values(), ids=OF_OTHER_DATA)
def test_the_suite_of_models_compares_all_parameters(model: Any, options: Any) -> None:
    (check,) = (each for each in model_checks(model, options) if each.name == "costs are those of the layers")
    assert options.costs(16, 130).vectors
    assert not check.run()


def test_what_a_plan_says_is_what_the_training_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "preset:tiny", "--gpus", "1", "--device", "a100"]) == 0
    assert capsys.readouterr().out.startswith("56,000 parameters fit 1 x ")
    assert main(["preset:tiny", "--dry-run"]) == 0
    assert "parameters of the model: 56,000\n" in capsys.readouterr().out
