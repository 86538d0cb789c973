"""BERT in Hugging Face folders: logits are transformers', and folders come back bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_run.config.values import nested
from megatron_run.contracts import Microbatch
from megatron_run.errors import RunError
from megatron_run_engine.formats import convert
from megatron_run_format_huggingface import HuggingFace, bert
from megatron_run_model_bert import Bert, BertOptions
from megatron_run_testing.build_contexts import single_process_context
from megatron_run_testing.model import build_model
from tests.plugins.format.huggingface.saving import save
from tests.support.small_models import fill

LENGTH = 16
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.3,
}


def theirs(folder: Path, head: str, **config: Any) -> Any:
    """A random model of transformers', saved in ``folder``."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, head)(transformers.BertConfig(**{**SMALL, **config})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape), alpha=0.3)
    save(model, folder)
    return model


def logits_of(source: Path, tokens: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
    """What we compute from the folder, [b, s, v]."""
    weights = HuggingFace().read(source)
    given = {key: value for key, value in weights.config.items() if key != "use"}
    options = BertOptions.model_validate(nested(given))
    context = single_process_context(options, dtype=torch.float32, train={"sequence_length": LENGTH})
    context = replace(context, fields=context.fields | {"token_types"})
    built = build_model(lambda context, _: Bert(context, options), context, options)
    fill(built, {name: read() for name, read in weights.tensors.items()})
    fields = {"tokens": tokens, "token_types": types}
    with torch.no_grad():
        found = built.train(mode=False).forward(Microbatch(0, 1, 0, fields, train=False))[0].logits
    assert found is not None
    return found[..., :61].transpose(0, 1)


@pytest.mark.parametrize(
    ("head", "config"),
    [("BertForMaskedLM", {}), ("BertForPreTraining", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3})],
    ids=["masked", "pretraining"],
)
def test_a_model_has_their_logits_and_goes_back_bit_for_bit(tmp_path: Path, head: str, config: Any) -> None:
    model = theirs(tmp_path / "hf", head, **config)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(61, (2, LENGTH), generator=generator)
    types = torch.randint(2, (2, LENGTH), generator=generator)
    found = model(tokens, token_type_ids=types)
    expected = found.logits if head == "BertForMaskedLM" else found.prediction_logits
    torch.testing.assert_close(logits_of(tmp_path / "hf", tokens, types), expected.detach(), rtol=1e-5, atol=1e-5)

    convert.import_model(tmp_path / "hf", tmp_path / "ours")
    convert.export_model(tmp_path / "ours", tmp_path / "back", "huggingface")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert after.keys() >= before.keys() - {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    for name, value in after.items():
        assert torch.equal(value, before[name]), name
    again = type(model).from_pretrained(tmp_path / "back")
    assert again.config.layer_norm_eps == model.config.layer_norm_eps
    theirs_again = again.eval()(tokens, token_type_ids=types)[0]
    torch.testing.assert_close(theirs_again, expected, rtol=1e-4, atol=1e-5)


def test_names_of_the_first_files_are_known(tmp_path: Path) -> None:
    theirs(tmp_path, "BertForPreTraining")
    file = tmp_path / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in load_file(file).items()
    }
    before = {name: read().clone() for name, read in bert.read(tmp_path).tensors.items()}
    save_file(old | {"bert.embeddings.position_ids": torch.arange(LENGTH)[None]}, file, {"format": "pt"})
    after = {name: read() for name, read in bert.read(tmp_path).tensors.items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_has_no_counterpart_is_refused_by_name(tmp_path: Path) -> None:
    theirs(tmp_path, "BertForMaskedLM")
    weights = bert.read(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for key, value in {"is_decoder": True, "hidden_act": "relu", "num_hidden_layers": 3}.items():
        (tmp_path / "config.json").write_text(json.dumps({**content, key: value}))
        with pytest.raises(RunError, match="encoder.layer.2" if key == "num_hidden_layers" else key):
            bert.read(tmp_path)
    for key, value in {"norm.order": "pre", "head": "span"}.items():
        with pytest.raises(RunError, match=f"model.{key}={value}"):
            bert.write(replace(weights, config=nested({**weights.config, key: value})), tmp_path / "out")
