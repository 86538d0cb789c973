"""BERT (Devlin et al. 2018): an encoder with norms after each sum, of model=bert, as a table read both ways.

``BertForMaskedLM`` is head=masked and ``BertForPreTraining`` head=pretraining. Other heads of fine-tuning have no one
form there, and an encoder without one cannot be trained on; both are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_run.config.values import flat, nested
from megatron_run.contracts import Weights
from megatron_run.errors import CheckpointError, InputError
from megatron_run_engine.checkpoint import FileSystem, followed
from megatron_run_engine.formats import names_fault, shapes_fault
from megatron_run_format_huggingface.family import Row, at_most_fp32, dropout_notes, must_be
from megatron_run_format_huggingface.model_folder import (
    CONFIG,
    SHARD,
    Tensors,
    check_layers,
    read_json,
    special_ids,
    write_json,
    write_tensor_files,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import ReadTensor

    Shape = tuple[int, ...]

#: Our options by the keys of ``config.json``, which has ``DEFAULTS`` where it leaves one out.
_KEYS: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "token_types": "type_vocab_size",
    "norm.eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "init_std": "initializer_range",
}
_DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
#: Keys whose other values have no counterpart here.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "hidden_act": tuple(_ACTIVATIONS),
}
_HEADS = {"masked": "BertForMaskedLM", "pretraining": "BertForPreTraining"}
#: Modules by their names there and here; h is the hidden size, f the feed-forward's, v the vocabulary, p positions, k
#: token types. Each has the weight of this shape, and a bias of its first size unless it is an embedding.
_LAYER = {
    "attention.self.query": ("attention.qkv.query", "hh"),
    "attention.self.key": ("attention.qkv.key", "hh"),
    "attention.self.value": ("attention.qkv.value", "hh"),
    "attention.output.dense": ("attention.output", "hh"),
    "attention.output.LayerNorm": ("attention_post_norm", "h"),
    "intermediate.dense": ("mlp.input.up", "fh"),
    "output.dense": ("mlp.output", "hf"),
    "output.LayerNorm": ("feed_post_norm", "h"),
}
_ENDS = {
    "bert.embeddings.LayerNorm": ("embedding.norm", "h"),
    "cls.predictions.transform.dense": ("head.dense", "hh"),
    "cls.predictions.transform.LayerNorm": ("head.norm", "h"),
}
_EMBEDDINGS = {
    "bert.embeddings.word_embeddings": ("embedding.word", "vh"),
    "bert.embeddings.position_embeddings": ("embedding.position", "ph"),
    "bert.embeddings.token_type_embeddings": ("embedding.token_type", "kh"),
}
#: Those of head=pretraining.
_ORDER = {"bert.pooler.dense": ("head.pooler.dense", "hh"), "cls.seq_relationship": ("head.order", "2h")}
_WORD_BIAS = "cls.predictions.bias"
#: What old files hold as well: positions as numbers, and what follows from the word embedding and its bias.
_SAME = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": _WORD_BIAS,
}
_REPEATED = frozenset({"bert.embeddings.position_ids", *_SAME})


def is_bert(source: Path) -> bool:
    """Whether ``source`` has a ``config.json`` of this family. Raises :class:`CheckpointError` for one that is none."""
    return (source / CONFIG).is_file() and read_json((source / CONFIG).resolve()).get("model_type") == "bert"


def read(source: Path) -> Weights:
    """The model in the folder ``source``; headers are read now, values later.

    Raises :class:`CheckpointError` with every reason why it cannot be imported.
    """
    config = {**_DEFAULTS, **read_json(followed(source / CONFIG))}
    check_layers(source, config)
    reasons = must_be(config, _ONLY)
    if config.get("quantization_config") is not None:
        reasons.append("its weights are quantised")
    if reasons:
        raise CheckpointError(f"{source} cannot be imported", why="; ".join(reasons))
    tensors = Tensors(source)
    # The first files of Google's models call the weight of a norm gamma, and its bias beta.
    named = {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): name
        for name in tensors.entries
    }
    head = "pretraining" if "cls.seq_relationship.weight" in named else "masked"
    rows = dict(_rows(config["num_hidden_layers"], head, _sizes(config)))
    ignored = _REPEATED if head == "pretraining" else {*_REPEATED, "bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    found = {name: tensors.entries[full].shape for name, full in named.items() if name not in ignored}
    if fault := shapes_fault(found, {foreign: shape for foreign, (_, shape) in rows.items()}):
        raise CheckpointError(f"the tensors in {source} do not match its {CONFIG}", why=fault)
    if fault := _untied(tensors):
        raise CheckpointError(f"{source} cannot be imported", why=fault)
    model = {option: config[key] for option, key in _KEYS.items()}
    model |= {"use": "bert", "norm.order": "post", "head": head, "activation": _ACTIVATIONS[config["hidden_act"]]}
    tokenizer = source / "tokenizer.json"
    return Weights(
        nested(model),
        {logical: partial(_read, tensors.reader(named[foreign])) for foreign, (logical, _) in rows.items()},
        sequence_length=config["max_position_embeddings"],
        notes=tuple(_notes(config, head)),
        tokenizer=tokenizer if tokenizer.is_file() else None,
    )


class Counterpart(NamedTuple):
    """A model there: its sizes by their keys, our ``model`` section, its ``rows``, and the shapes of ours."""

    config: Mapping[str, Any]
    model: Mapping[str, Any]
    rows: Mapping[str, Row]
    shapes: Mapping[str, Shape]


def counterpart(weights: Weights) -> Counterpart:
    """The model at Hugging Face. Raises :class:`InputError` with every reason why it is not of this family."""
    model: dict[str, Any] = {"norm.order": "pre", "head": "masked", "activation": "gelu", **flat(weights.config)}
    reasons = [] if model["norm.order"] == "post" else [f"model.norm.order={model['norm.order']} (the family has post)"]
    if model["head"] not in _HEADS:
        reasons.append(f"model.head={model['head']} (the family has {' or '.join(_HEADS)})")
    positions = model.get("max_positions") or weights.sequence_length
    if positions is None or model.get("vocab_size") is None:
        reasons.append("how many positions and words it has is unknown")
    if reasons:
        raise InputError("the model has no counterpart at Hugging Face", why=f"no bert: {', '.join(reasons)}")
    config: dict[str, Any] = {key: model[option] for option, key in _KEYS.items() if option in model}
    config["intermediate_size"] = model.get("ffn_size") or 4 * config["hidden_size"]
    config = {**_DEFAULTS, **config, "max_position_embeddings": positions}
    rows = dict(_rows(config["num_hidden_layers"], str(model["head"]), _sizes(config)))
    if fault := names_fault(weights.tensors, [logical for logical, _ in rows.values()]):
        raise InputError("the model has no counterpart at Hugging Face", why=fault)
    named = {foreign: Row(foreign, (logical,)) for foreign, (logical, _) in rows.items()}
    return Counterpart(config, model, named, dict(rows.values()))


def write(weights: Weights, folder: Path) -> None:
    """Write ``config.json`` and the weights, in fp32, into ``folder``. Raises as :func:`counterpart` does."""
    config, model, rows, _ = counterpart(weights)
    files = FileSystem()
    write_tensor_files(folder, ((name, partial(row.pack, weights.tensors)) for name, row in rows.items()), files, SHARD)
    content = {
        **config,
        "model_type": "bert",
        "architectures": [_HEADS[str(model["head"])]],
        "hidden_act": {logical: foreign for foreign, logical in _ACTIVATIONS.items()}[str(model["activation"])],
        "attention_probs_dropout_prob": config["hidden_dropout_prob"],
        "dtype": "float32",
        "torch_dtype": "float32",  # the key's name in older versions
        "pad_token_id": special_ids(weights)["pad_token_id"],
    }
    write_json(folder / CONFIG, content, files)
    files.sync_folder(folder)


def _untied(tensors: Tensors) -> str:
    """The tensors in the files of an output layer of its own, which our model does not have."""
    for repeated, first in _SAME.items():
        both = repeated in tensors.entries and first in tensors.entries
        if both and not torch.equal(tensors.reader(repeated)(), tensors.reader(first)()):
            return f"{repeated} differs from {first}, of which it is a copy in models like ours"
    return ""


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    keys = ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "type_vocab_size")
    return {**dict(zip("hfvpk", (config[key] for key in keys), strict=True)), "2": 2}


def _rows(layers: int, head: str, sizes: Mapping[str, int]) -> Iterator[tuple[str, tuple[str, Shape]]]:
    """Each of their tensors with ours, and its shape."""
    for foreign, (logical, shape) in _EMBEDDINGS.items():
        yield f"{foreign}.weight", (f"{logical}.weight", tuple(sizes[size] for size in shape))
    modules = {**_ENDS, **(_ORDER if head == "pretraining" else {})}
    for layer in range(layers):
        modules |= {
            f"bert.encoder.layer.{layer}.{foreign}": (f"layers.{layer}.{logical}", shape)
            for foreign, (logical, shape) in _LAYER.items()
        }
    for foreign, (logical, shape) in modules.items():
        full = tuple(sizes[size] for size in shape)
        yield f"{foreign}.weight", (f"{logical}.weight", full)
        yield f"{foreign}.bias", (f"{logical}.bias", full[:1])
    yield _WORD_BIAS, ("head.bias.weight", (sizes["v"],))


def _read(read: ReadTensor) -> Tensor:
    return at_most_fp32(read())


def _notes(config: Mapping[str, Any], head: str) -> Iterator[str]:
    yield from dropout_notes({key: config[key] for key in ("hidden_dropout_prob", "attention_probs_dropout_prob")})
    if head == "pretraining":
        yield "its head told whether a sentence follows another one; here it tells which of two came first"
