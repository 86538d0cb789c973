"""A valid file for each reader of foreign bytes, small and made in a moment."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import warnings
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_run.config.yaml import bare, parse
from megatron_run.contracts import Weights
from megatron_run.contracts.activity import Activity, Collective
from megatron_run_engine.checkpoint.files import FileSystem
from megatron_run_engine.checkpoint.reader import TensorFile
from megatron_run_engine.data.indexed_files import IndexedWriter
from megatron_run_engine.data.tokenizer_training import train_tokenizer
from megatron_run_engine.formats.gpt_tensors import gpt_options, logical_shapes
from megatron_run_engine.launch.watchdog.page import PageWriter
from megatron_run_format_distributed import Distributed
from megatron_run_format_huggingface import model_folder
from megatron_run_format_huggingface.families import FAMILIES
from tests.support.forked import run_forked, tiny
from tests.support.saved_steps import random_state, save_alone

#: Of the run that is a sample.
RUN_VALUES: Mapping[str, Any] = {"train.steps": 2, "eval.interval": 1, "data.vocab_size": 40}


def compressed(content: bytes) -> bytes:
    """``content`` as a ``.zst``."""
    import zstandard

    return zstandard.ZstdCompressor().compress(content)


def write_samples(folder: Path, wanted: Collection[str]) -> None:
    """Write into the new ``folder`` those of its folders that are ``wanted``."""
    folder.mkdir()
    for each, write in _SAMPLES.items():
        if set(wanted) & set(each):
            write(folder)


def _write_config(folder: Path) -> None:
    preset = files("megatron_run") / "presets" / "tiny.yaml"
    (folder / "config").mkdir()
    (folder / "config" / "tiny.yaml").write_bytes(preset.read_bytes())
    sections = parse(preset.read_text(encoding="utf-8"), "x")
    (folder / "config" / "tiny.json").write_text(json.dumps({name: bare(node) for name, node in sections.items()}))


def _write_words(folder: Path) -> None:
    (folder / "words").mkdir()
    (folder / "words" / "words.json").write_text("[]")


def _write_run(folder: Path) -> None:
    assert run_forked(tiny(folder / "run", RUN_VALUES, nproc=1)).code == 0


def _write_history(folder: Path) -> None:
    home = folder / "history"
    for step in (1, 2):
        (home / "checkpoints" / f"step{step}").mkdir(parents=True)
    row = {"v": 1, "attempt": 1, "time": 1.5, "samples": 4, "loss": 3.5, "lr": 0.0, "skipped": False, "extra": {"a": 1}}
    changed = {"changes": {"train.lr": [1, 2]}}
    found = [{"step": 1, **row}, {**changed, "step": 1}, {"step": 2, **row}]
    (home / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    scored = [{"step": step, "split": "validation", "loss": 3.5, "perplexity": 33.1, "tokens": 8} for step in (1, 2)]
    (home / "eval.jsonl").write_text("".join(json.dumps(each) + "\n" for each in scored))


def _write_sweep(folder: Path) -> None:
    from megatron_run_sweep.record import Run, Sweep, write_sweep

    home = folder / "sweep"
    home.mkdir()
    runs = (Run(values={"train.lr": "1e-3"}, exit_code=0), Run(values={"train.lr": "1e-2"}))
    write_sweep(Sweep(configs=("preset:tiny",), over=("train.lr=1e-3,1e-2",), runs=runs), home)
    for index, loss in enumerate((3.5, 2.5)):
        run = home / f"run-00{index}"
        run.mkdir()
        (run / "status.json").write_text(json.dumps({"state": "failed", "step": 2, "exit_code": 6, "message": "why"}))
        scored = [{"step": step, "split": "validation", "loss": loss, "extra": {"a": 1}} for step in (1, 2)]
        (run / "eval.jsonl").write_text("".join(json.dumps(each) + "\n" for each in scored))


def _write_catalogue(folder: Path) -> None:
    (folder / "catalogue").mkdir()
    listed = {
        "kind": "schedule",
        "name": "a",
        "distribution": "acme-a",
        "summary": "About a",
        "url": "https://a.example",
    }
    (folder / "catalogue" / "plugins.json").write_text(json.dumps({"v": 1, "plugins": [listed, listed]}))


def _write_step(folder: Path) -> None:
    save_alone(folder / "saved", 1, random_state(1, tensors=2))


def _write_plans(folder: Path) -> None:
    (folder / "planner").mkdir()
    device = files("megatron_run_planner") / "devices" / "a100.yaml"
    (folder / "planner" / "device.yaml").write_bytes(device.read_bytes())
    table = Path(__file__).parents[1] / "planner" / "tables" / "a100_single.csv"
    (folder / "planner" / "runs.csv").write_bytes(b"\n".join(table.read_bytes().split(b"\n")[:8]))


def _gpt(**more: Any) -> Weights:
    """A model whose values are zeros."""
    config = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "ffn_size": 32, "vocab_size": 32, **more}
    shapes = logical_shapes(gpt_options(Weights(config, {}, sequence_length=8)), 8)
    return Weights(config, {name: partial(torch.zeros, shape) for name, shape in shapes.items()}, sequence_length=8)


_LLAMA: Mapping[str, Any] = {
    "norm": {"kind": "rmsnorm"}, "position": "rope", "activation": "swiglu", "bias": False, "tie_embeddings": False,
}  # fmt: skip


def _write_models(folder: Path) -> None:
    models = {"gpt2": _gpt(), "llama": _gpt(**_LLAMA), "mixtral": _gpt(**_LLAMA, experts={"count": 4})}
    for name, weights in models.items():
        (folder / name).mkdir()
        model_folder.write(weights, folder / name)
    (folder / "gpt2" / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.7}')
    shutil.copytree(folder / "llama", folder / "parts", ignore=shutil.ignore_patterns("*.safetensors"))
    whole = TensorFile(folder / "llama" / "model.safetensors")
    tensors = [(name, partial(whole.read, name)) for name in whole.entries]
    model_folder.write_tensor_files(folder / "parts", tensors, FileSystem(), 4096)
    (folder / "export").mkdir()
    Distributed().write(models["gpt2"], folder / "export")


def _write_families(folder: Path) -> None:
    """What each family of models says of its sizes, without weights: it is read before they are."""
    for name, family in FAMILIES.items():
        (folder / "families" / name).mkdir(parents=True)
        described = {"model_type": name, **family.defaults}
        (folder / "families" / name / "config.json").write_text(json.dumps(described))


def _write_megatron(folder: Path) -> None:
    from tests.support.megatron_checkpoints import GPT, random_state, save_sharded

    state = random_state(GPT)
    save_sharded(state, GPT, folder / "megatron", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no other ranks
        save(dict(state), storage_writer=FileSystemWriter(folder / "distributed"), no_dist=True)
    torch.save({"args": Namespace(**GPT), "iteration": 5}, folder / "distributed" / "common.pt")
    (folder / "distributed" / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    shutil.copytree(Path(__file__).parents[1] / "plugins" / "format" / "megatron" / "golden", folder / "scripts")


def _write_tokenizers(folder: Path) -> None:
    from sentencepiece import SentencePieceTrainer

    for name in ("tokenizer", "bpe", "wordpiece", "sentencepiece", "chat"):
        (folder / name).mkdir()
    text = ["the cat sat on a mat, and 12 dogs ran home.\n"] * 20
    file = folder / "tokenizer" / "tokenizer.json"
    train_tokenizer(text, "bpe", 300, file)
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    end = {"__type": "AddedToken", "content": "</s>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": end, "chat_template": [{"name": "default", "template": template}]})
    )
    made = json.loads(file.read_bytes())["model"]
    (folder / "bpe" / "vocab.json").write_text(json.dumps(made["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in made["merges"]]
    (folder / "bpe" / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat ##s 12 . ,"
    (folder / "wordpiece" / "vocab.txt").write_text("\n".join(words.split()) + "\n")
    (folder / "wordpiece" / "tokenizer_config.json").write_text('{"do_lower_case": true, "strip_accents": null}')
    shutil.copy(file, folder / "chat")
    (folder / "chat" / "chat_template.jinja").write_text(template)
    lines = [{"prompt": "a", "response": "b"}, {"messages": [{"role": "assistant", "content": "c"}]}]
    (folder / "chat" / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, vocab_size=40, hard_vocab_limit=False, minloglevel=2
    )
    (folder / "sentencepiece" / "tokenizer.model").write_bytes(model.getvalue())


def _write_indexed(folder: Path) -> None:
    for name in ("indexed", "cache/key"):
        (folder / name).mkdir(parents=True)
    with IndexedWriter(folder / "indexed" / "c", np.uint16, modes=True) as writer:
        for length in (3, 0, 5, 1):
            writer.add(np.arange(length))
            writer.end_document()
    about = {"tokenizer": "bytes", "vocab_size": 257, "end_of_document": 256, "documents": 4, "inputs": ["a"]}
    (folder / "indexed" / "c.json").write_text(json.dumps(about))
    np.save(folder / "cache" / "key" / "order.npy", np.arange(40))


def _write_texts(folder: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    home, texts, tokens = folder / "texts", [{"text": f"document {n}\u00e9"} for n in range(6)], [[1, 2, 3], [4], []]
    home.mkdir()
    lines = "\n".join(map(json.dumps, texts)).encode()
    (home / "a.jsonl").write_bytes(lines)
    (home / "a.txt").write_bytes(b"one\n\ntwo\n" * 9)
    (home / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (home / "a.jsonl.zst").write_bytes(compressed(lines))
    (home / "tokens.jsonl").write_text("\n".join(json.dumps({"tokens": each}) for each in tokens))
    parquet.write_table(arrow.table({"text": [each["text"] for each in texts]}), home / "a.parquet")
    parquet.write_table(arrow.table({"tokens": tokens}), home / "tokens.parquet")
    (home / "cloze.jsonl").write_text('{"text": "the cat sat"}\nplain words here\n')
    (home / "prompts.json").write_text('["one", "two"]')


def _write_tasks(folder: Path) -> None:
    from tests.plugins.data.nlu.published import mnli, qqp, race, squad

    mnli(folder / "mnli")
    row = json.dumps({"sentence1": "a", "sentence2": "b", "gold_label": "neutral"})
    (folder / "mnli" / "train.jsonl").write_text("\n".join([row] * 3))
    qqp(folder / "qqp")
    race(folder / "race")
    squad(folder / "squad", "v2.0")


def _write_wire(folder: Path) -> None:
    (folder / "wire").mkdir()
    lines = [{"quiet": 6.0, "stopped": 0.0}, {"quiet": 1.0, "stopped": 7.5, "page": "AQ=="}, {"over": 4}, {"gone": "x"}]
    (folder / "wire" / "sidecar").write_text("\n".join(map(json.dumps, lines)) + "\n")
    greeting = [{"word": "00"}, {"rank": 1, "word": "ab", "proof": "cd"}]
    (folder / "wire" / "greeting").write_text("\n".join(map(json.dumps, greeting)) + "\n")
    activity = Activity()
    activity.members["data"] = (0, 1)
    PageWriter(folder / "wire" / "page", activity)(3, "backward", Collective("sum", "data", 4, 100))


#: What writes the folders of samples, by their names.
_SAMPLES: Mapping[tuple[str, ...], Callable[[Path], None]] = {
    ("config",): _write_config,
    ("words",): _write_words,
    ("run",): _write_run,
    ("history",): _write_history,
    ("sweep",): _write_sweep,
    ("catalogue",): _write_catalogue,
    ("saved",): _write_step,
    ("planner",): _write_plans,
    ("gpt2", "llama", "mixtral", "parts", "export"): _write_models,
    ("families",): _write_families,
    ("megatron", "distributed", "scripts"): _write_megatron,
    ("tokenizer", "bpe", "wordpiece", "sentencepiece", "chat"): _write_tokenizers,
    ("indexed", "cache"): _write_indexed,
    ("texts",): _write_texts,
    ("mnli", "qqp", "race", "squad"): _write_tasks,
    ("wire",): _write_wire,
}
